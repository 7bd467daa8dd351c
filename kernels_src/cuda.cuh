// What every kernel includes. nvcc compiles a kernel for the GPU; g++ compiles the same text for
// the CPU (cpu/), where a block's threads are fibers. Only these spellings differ from plain CUDA:
//     EXPORT cudaError_t f(..., cudaStream_t stream)           a function that jit_loader finds
//     LAUNCH(kernel, grid, block, shared_bytes, stream)(...)   launches; returns cudaError_t
//     LAUNCH_CLUSTER(kernel, grid, block, cluster, shared_bytes, stream)(...)
//     LAUNCH(...).early()(...)                         may start before the kernel before has ended
//     SHARED(float, tile, [32][33]);   __shared__ float tile[32][33], aligned to 16 bytes
//     DYNAMIC_SHARED(float, buffer);   float* buffer, aligned to 1024 bytes
// Headers use no single capital letter as a name: stages are compiled with defines such as D and H.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

#ifdef __CUDACC__

#include <cuda_runtime.h>
#include <pthread.h>

#define SHARED(type, name, ...) __shared__ __align__(16) type name __VA_ARGS__
#define DYNAMIC_SHARED(type, name)                                    \
    extern __shared__ __align__(1024) unsigned char dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(dynamic_shared)

#define LAUNCH(...) gpu::launch_of(#__VA_ARGS__, __VA_ARGS__)
#define LAUNCH_CLUSTER(...) gpu::cluster_launch_of(#__VA_ARGS__, __VA_ARGS__)

// The CPU's errors name a source line; functions that can fail pass on their caller's.
#define CALLER
#define PASS_CALLER
#define SYNCTHREADS(...) __syncthreads()
#define REQUIRE_ALIGNED(pointer, bytes)

namespace [[gnu::visibility("hidden")]] gpu {

// Of the last launch on this OS thread that failed.
inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local char last_error_text[512];

// The most dynamic shared memory that launches of a kernel on a device have asked for.
struct Allowance {
    const void* kernel;
    int device;
    size_t bytes;
    Allowance* next;
};

// More than 48 KB, SHARED arrays included, has to be asked for. Asks only for more than any launch
// before: the runtime remembers it, and to ask for less would take that back.
inline cudaError_t allow_shared_bytes(const void* kernel, size_t bytes) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static Allowance* allowances = nullptr;
    int device = 0;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    pthread_mutex_lock(&mutex);
    Allowance* known = allowances;
    while (known && (known->kernel != kernel || known->device != device)) known = known->next;
    if (!known) known = allowances = new Allowance{kernel, device, 0, allowances};
    cudaError_t error = cudaSuccess;
    if (bytes > known->bytes) {
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes < INT32_MAX ? bytes : INT32_MAX));
        if (!error) known->bytes = bytes;
    }
    pthread_mutex_unlock(&mutex);
    return error;
}

// A kernel with its launch configuration; calling it launches. A count or type of arguments that
// the kernel does not take is a compile error in the line of LAUNCH.
template <typename... Parameters>
struct Launch {
    const char* text;  // LAUNCH's arguments, of which the kernel is the first
    void (*kernel)(Parameters...);
    dim3 grid, block, cluster;
    size_t shared_bytes;
    cudaStream_t stream;
    bool starts_early = false;

    // Launches while the kernel before it on the stream still runs; see hopper.cuh.
    Launch early(bool allowed = true) const {
        Launch launch = *this;
        launch.starts_early = allowed;
        return launch;
    }

    cudaError_t operator()(Parameters... arguments) const {
        cudaError_t error = cudaSuccess;
        if (shared_bytes > 0) {
            error = allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
        }
        if (!error) {
            cudaLaunchAttribute attributes[2] = {};
            cudaLaunchConfig_t config = {};
            config.gridDim = grid;
            config.blockDim = block;
            config.dynamicSmemBytes = shared_bytes;
            config.stream = stream;
            config.attrs = attributes;
            if (cluster.x * cluster.y * cluster.z > 1) {
                cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
                attribute.id = cudaLaunchAttributeClusterDimension;
                attribute.val.clusterDim = {cluster.x, cluster.y, cluster.z};
            }
            if (starts_early) {
                cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
                attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
                attribute.val.programmaticStreamSerializationAllowed = 1;
            }
            error = cudaLaunchKernelEx(&config, kernel, arguments...);
        }
        if (error) describe(error);
        return error;
    }

    void describe(cudaError_t error) const {
        cudaGetLastError();  // or someone else's next check in this process would report it
        last_error = error;
        snprintf(
            last_error_text, sizeof last_error_text,
            "%s: %.*s, grid (%u,%u,%u), block (%u,%u,%u), cluster (%u,%u,%u), %zu bytes of dynamic "
            "shared memory",
            cudaGetErrorString(error), static_cast<int>(strcspn(text, "<,")), text, grid.x, grid.y,
            grid.z, block.x, block.y, block.z, cluster.x, cluster.y, cluster.z, shared_bytes);
    }
};

template <typename... Parameters>
Launch<Parameters...> launch_of(const char* text, void (*kernel)(Parameters...), dim3 grid,
                                dim3 block, size_t shared_bytes, cudaStream_t stream) {
    return {text, kernel, grid, block, dim3(1), shared_bytes, stream};
}

template <typename... Parameters>
Launch<Parameters...> cluster_launch_of(const char* text, void (*kernel)(Parameters...), dim3 grid,
                                        dim3 block, dim3 cluster, size_t shared_bytes,
                                        cudaStream_t stream) {
    return {text, kernel, grid, block, cluster, shared_bytes, stream};
}

}  // namespace gpu

// What went wrong in the last launch, or CUDA's words for the code.
EXPORT const char* kernel_error_text(int code) {
    const cudaError_t error = static_cast<cudaError_t>(code);
    return error && error == gpu::last_error ? gpu::last_error_text : cudaGetErrorString(error);
}

// An address of shared memory as instructions take it.
__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

#else
#include "cpu/backend.h"
#endif

constexpr int kWarpSize = 32;
constexpr uint32_t kFullMask = 0xFFFFFFFF;  // every lane of a warp

template <typename Number, typename Divisor>
__host__ __device__ constexpr auto ceil_div(Number number, Divisor divisor) {
    return (number + divisor - 1) / divisor;
}

// 16 bytes at once; the address must be a multiple of 16.
__device__ inline float4 load4(const float* from CALLER) {
    REQUIRE_ALIGNED(from, 16);
    return *reinterpret_cast<const float4*>(from);
}
__device__ inline void store4(float* to, float4 value CALLER) {
    REQUIRE_ALIGNED(to, 16);
    *reinterpret_cast<float4*>(to) = value;
}

// The sum over a whole warp, in every lane.
template <typename Value>
__device__ inline Value warp_sum(Value value CALLER) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(kFullMask, value, distance, kWarpSize PASS_CALLER);
    }
    return value;
}

// The largest value of a whole warp, in every lane.
template <typename Value>
__device__ inline Value warp_max(Value value CALLER) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value = max(value, __shfl_xor_sync(kFullMask, value, distance, kWarpSize PASS_CALLER));
    }
    return value;
}

// The sum over a block of whole warps, in every thread; `scratch` is shared memory for one value a
// warp. It ends with a barrier, so that scratch may be used again at once.
template <typename Value>
__device__ inline Value block_sum(Value value, Value* scratch CALLER) {
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int warps = blockDim.x * blockDim.y * blockDim.z / kWarpSize;
    value = warp_sum(value PASS_CALLER);
    if (thread % kWarpSize == 0) scratch[thread / kWarpSize] = value;
    SYNCTHREADS(site);
    Value total = 0;
    for (int warp = 0; warp < warps; ++warp) total += scratch[warp];
    SYNCTHREADS(site);
    return total;
}
