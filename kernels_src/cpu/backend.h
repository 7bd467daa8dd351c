// The CPU's side of cuda.cuh: CUDA's spellings under g++.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <type_traits>

#include <vector_functions.h>

#undef __global__
#undef __device__
#undef __host__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __builtin_assume(condition) static_cast<void>(0)

#include "barrier.h"
#ifdef RACES
#include "compiler_calls.h"
#endif
#include "device_functions.h"
#include "launch.h"
#include "warp.h"

#define LAUNCH(...) cpu::launch_of(#__VA_ARGS__, __VA_ARGS__)
#define LAUNCH_CLUSTER(...) cpu::cluster_launch_of(#__VA_ARGS__, __VA_ARGS__)

// One array for all threads of a block, told from others by its declaration's address.
#define SHARED(type, name, ...)                                                        \
    typedef type name##_array __VA_ARGS__;                                             \
    static cpu::SharedDeclaration name##_declaration{                                  \
        #name, sizeof(name##_array), sizeof(std::remove_all_extents_t<name##_array>)}; \
    name##_array& name = *static_cast<name##_array*>(cpu::shared_array(name##_declaration))
#define DYNAMIC_SHARED(type, name) \
    type* name = static_cast<type*>(cpu::current_block->shared.dynamic())

#define CALLER , cpu::Site site = cpu::Site::here()
#define PASS_CALLER , site
#define SYNCTHREADS(site) __syncthreads(site)
#define REQUIRE_ALIGNED(pointer, bytes) cpu::require_aligned(pointer, bytes, site)

namespace [[gnu::visibility("hidden")]] cpu {

inline void* shared_array(const SharedDeclaration& declaration, Site site = Site::here()) {
    IN_RACES(const Quiet quiet;)
    SharedMemory& shared = current_block->shared;
    void* array = shared.find_or_add(&declaration);
    if (!array) {
        current_block->fail(
            *current_thread, site,
            "shared array '%s' of %zu bytes does not fit: with it the block has %zu bytes of "
            "static shared memory (at most %zu) and %zu of dynamic (at most %zu together)",
            declaration.name, declaration.bytes, shared.static_bytes(), kStaticSharedLimit,
            shared.dynamic_bytes(), kSharedLimit);
    }
    return array;
}

inline void require_aligned(const void* pointer, int bytes, Site site) {
    if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) {
        current_block->fail(*current_thread, site, "misaligned address %p: %d must divide it",
                            pointer, bytes);
    }
}

}  // namespace cpu

// An address of shared memory as the GPU's instructions take it.
inline uint32_t shared_address(const void* pointer) {
    return cpu::current_block->shared.offset_of(pointer);
}

inline void __trap(cpu::Site site = cpu::Site::here()) {
    cpu::current_block->fail(*cpu::current_thread, site, "__trap");
}
