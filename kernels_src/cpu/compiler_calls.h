// What g++ -fsanitize=thread calls at every access to memory, answered by the race detector.
#pragma once

#include "races.h"

namespace [[gnu::visibility("hidden")]] cpu {

UNSEEN inline void compiled_access(Kind kind, const void* address, size_t bytes, const void* code) {
    Thread* thread = current_thread;
    if (!thread) return;
    const Site site{static_cast<const char*>(code), 0};
    Races& races = *thread->block->races;
    if (is_own_variable(address) || thread->block->has_on_stack(address)) {
        if (thread->quiet == 0 && thread->may_hold(address)) races.check_held(kind, site, address);
    } else if (const bool counts = thread->quiet == 0; counts || thread->repeated) {
        const Quiet quiet;
        if (thread->repeated) races.check_repeated();
        if (counts) races.access(races.by(*thread, kind, site), address, bytes);
    }
}

}  // namespace cpu

#define COMPILER_CALL extern "C" UNSEEN __attribute__((used, visibility("hidden")))
#define DEFINE_ACCESS(name, kind, bytes)                                                    \
    COMPILER_CALL void __tsan_##name##bytes(void* address) {                                \
        if (cpu::is_own_variable(address) && !cpu::arrays_are_held()) return;               \
        cpu::compiled_access(cpu::Kind::kind, address, bytes, __builtin_return_address(0)); \
    }
#define DEFINE_ACCESSES(bytes)                   \
    DEFINE_ACCESS(read, Read, bytes)             \
    DEFINE_ACCESS(write, Write, bytes)           \
    DEFINE_ACCESS(unaligned_read, Read, bytes)   \
    DEFINE_ACCESS(unaligned_write, Write, bytes) \
    DEFINE_ACCESS(volatile_read, Read, bytes)    \
    DEFINE_ACCESS(volatile_write, Write, bytes)
DEFINE_ACCESSES(1)
DEFINE_ACCESSES(2)
DEFINE_ACCESSES(4)
DEFINE_ACCESSES(8)
DEFINE_ACCESSES(16)
#undef DEFINE_ACCESSES
#undef DEFINE_ACCESS
COMPILER_CALL void __tsan_read_range(void* address, size_t bytes) {
    cpu::compiled_access(cpu::Kind::Read, address, bytes, __builtin_return_address(0));
}
COMPILER_CALL void __tsan_write_range(void* address, size_t bytes) {
    cpu::compiled_access(cpu::Kind::Write, address, bytes, __builtin_return_address(0));
}
COMPILER_CALL void __tsan_init() {}
COMPILER_CALL void __tsan_func_entry(void*) {}
COMPILER_CALL void __tsan_func_exit() {}
COMPILER_CALL void __tsan_vptr_read(void*) {}
COMPILER_CALL void __tsan_vptr_update(void*, void*) {}

// The backend's own atomics; those of kernels tell the detector themselves (device_functions.h).
#define DEFINE_ATOMIC(bits, type, name)                                                   \
    COMPILER_CALL type __tsan_atomic##bits##_##name(volatile void* at, type value, int) { \
        return __atomic_##name(static_cast<volatile type*>(at), value, __ATOMIC_SEQ_CST); \
    }
#define DEFINE_ATOMICS(bits, type)                                                            \
    COMPILER_CALL type __tsan_atomic##bits##_load(const volatile void* at, int) {             \
        return __atomic_load_n(static_cast<const volatile type*>(at), __ATOMIC_SEQ_CST);      \
    }                                                                                         \
    COMPILER_CALL void __tsan_atomic##bits##_store(volatile void* at, type value, int) {      \
        __atomic_store_n(static_cast<volatile type*>(at), value, __ATOMIC_SEQ_CST);           \
    }                                                                                         \
    COMPILER_CALL type __tsan_atomic##bits##_exchange(volatile void* at, type value, int) {   \
        return __atomic_exchange_n(static_cast<volatile type*>(at), value, __ATOMIC_SEQ_CST); \
    }                                                                                         \
    COMPILER_CALL bool __tsan_atomic##bits##_compare_exchange_strong(                         \
        volatile void* at, void* expected, type value, int, int) {                            \
        return __atomic_compare_exchange_n(static_cast<volatile type*>(at),                   \
                                           static_cast<type*>(expected), value, false,        \
                                           __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);               \
    }                                                                                         \
    COMPILER_CALL bool __tsan_atomic##bits##_compare_exchange_weak(                           \
        volatile void* at, void* expected, type value, int, int) {                            \
        return __atomic_compare_exchange_n(static_cast<volatile type*>(at),                   \
                                           static_cast<type*>(expected), value, true,         \
                                           __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);               \
    }                                                                                         \
    DEFINE_ATOMIC(bits, type, fetch_add)                                                      \
    DEFINE_ATOMIC(bits, type, fetch_sub)                                                      \
    DEFINE_ATOMIC(bits, type, fetch_and)                                                      \
    DEFINE_ATOMIC(bits, type, fetch_or)                                                       \
    DEFINE_ATOMIC(bits, type, fetch_xor)
DEFINE_ATOMICS(8, unsigned char)
DEFINE_ATOMICS(16, unsigned short)
DEFINE_ATOMICS(32, unsigned int)
DEFINE_ATOMICS(64, unsigned long)
#undef DEFINE_ATOMICS
#undef DEFINE_ATOMIC
COMPILER_CALL void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#undef COMPILER_CALL
