// Kernels that are right, and with `bug` a little wrong: test_cpu_backend.py says what must be
// reported. Blocks have 64 threads. Each computes something simple of x, so that the right result
// is known.
#include "cuda.cuh"

constexpr int kThreads = 64;

// y = x reversed within the block
__global__ void missing_barrier(const float* x, float* y, int bug) {
    SHARED(float, tile, [kThreads]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    tile[t] = x[first + t];
    if (!bug) __syncthreads();
    y[first + t] = tile[kThreads - 1 - t];
}

// y = x rotated by two places; without the second barrier a thread may overwrite what another must
// read
__global__ void overwritten_too_early(const float* x, float* y, int bug) {
    SHARED(float, tile, [kThreads]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    float value = x[first + t];
    for (int turn = 0; turn < 2; ++turn) {
        tile[t] = value;
        __syncthreads();
        value = tile[(t + 1) % kThreads];
        if (!bug) __syncthreads();
    }
    y[first + t] = value;
}

// y = x; bug 1 writes one element past the end of `tile`, 2 one before its start, 3 past dynamic
// memory
__global__ void shared_overrun(const float* x, float* y, int bug) {
    SHARED(float, before, [5]);
    SHARED(float, tile, [kThreads]);
    DYNAMIC_SHARED(float, dynamic);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    before[t % 5] = 0;
    dynamic[t + (bug == 3)] = x[first + t];
    __syncthreads();  // loaded
    tile[t + (bug == 1) - (bug == 2)] = dynamic[t];
    __syncthreads();  // the overrun is noticed here
    y[first + t] = tile[t];
}

// y = x; with the bug the neighbour past the array's end is added
__global__ void shared_overread(const float* x, float* y, int bug) {
    SHARED(float, tile, [kThreads]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    tile[t] = x[first + t];
    __syncthreads();
    y[first + t] = tile[t] + (bug ? 0 * tile[t + 1] : 0);
}

// y = x; bug 1 splits the barrier in two lines, 2 lets half of the threads return before it, 3 is
// both halves waiting for each other at different things
__global__ void divergent_barrier(const float* x, float* y, int bug) {
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    y[first + t] = x[first + t];
    if (bug == 2 && t >= 32) return;
    if (bug == 1 && t >= 32) {
        __syncthreads();  // second barrier
    } else if (bug == 3 && t == 5) {
        __shfl_sync(kFullMask, x[t], 0);  // alone
    } else {
        __syncthreads();  // first barrier
    }
}

// y = x; bug 1: the upper lanes do not come to the shuffle; 2: they come with another mask; 3: they
// return; 4: a lane is not in its own mask; 5: a lane outside of the mask is read; 6: another
// function
__global__ void shuffle(const float* x, float* y, int bug) {
    const int t = threadIdx.x, first = blockIdx.x * kThreads, lane = t % kWarpSize;
    float value = x[first + t];
    if (lane >= 16 && bug == 3) return;
    if (lane < 16 || bug == 0 || bug > 3) {
        const uint32_t mask = bug == 4   ? ~(1u << lane)
                              : bug == 5 ? 0xFFFF << (lane & 16)
                                         : kFullMask;
        if (bug == 6 && lane >= 16) {
            __ballot_sync(mask, 1);  // vote
        } else {
            value = __shfl_xor_sync(mask, value, 16);  // exchange
        }
    } else if (bug == 2) {
        __shfl_xor_sync(0xFFFF0001, value, 1);  // other mask
    }
    __syncthreads();  // all together
    y[first + t] = bug ? value : __shfl_xor_sync(kFullMask, value, 16);
}

// y = the block's sum of x in every element; with the bug one element is never written
__global__ void uninitialised(const float* x, float* y, int bug) {
    SHARED(float, tile, [kThreads]);
    SHARED(float, scratch, [kThreads / kWarpSize]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    if (!bug || t != 17) tile[t] = x[first + t];
    __syncthreads();
    y[first + t] = block_sum(tile[t], scratch);
}

// y = x; with the bug the thread's four elements begin one too late
__global__ void misaligned(const float* x, float* y, int bug) {
    const int first = blockIdx.x * kThreads + threadIdx.x / 4 * 4;
    const float4 values = load4(x + first + bug);  // sixteen bytes
    if (threadIdx.x % 4 == 0) store4(y + first, values);
}

// y = x, if so much static shared memory fits
template <int kBytes>
__global__ void static_shared_of(const float* x, float* y) {
    SHARED(char, large, [kBytes - 4]);
    SHARED(float, value, );  // the last 4 bytes
    if (threadIdx.x == 0) value = large[kBytes - 5];
    __syncthreads();
    const int at = blockIdx.x * kThreads + threadIdx.x;
    y[at] = x[at] + 0 * value;
}

// y = x, if so much dynamic shared memory is there
__global__ void dynamic_shared_of(const float* x, float* y, int bytes) {
    DYNAMIC_SHARED(char, large);
    if (threadIdx.x == 0) large[bytes - 1] = 1;
    const int at = blockIdx.x * kThreads + threadIdx.x;
    y[at] = x[at];
}

// y = x by way of a large local array, with the bug larger than a stack
__global__ void local_array(const float* x, float* y, int bug) {
    volatile float local[70000];
    const int at = blockIdx.x * kThreads + threadIdx.x, last = bug ? 70000 : 16;
    for (int i = 0; i < last; ++i) local[69999 - i] = x[at];
    y[at] = local[69999 - threadIdx.x % 16];
}

// y = x, handed from warp 0 to warp 1 and back at named barriers, and once more when a counter says
// so; bug 1: one side expects fewer threads; 2: nobody counts
__global__ void waiting(const float* x, float* y, int bug) {
    SHARED(float, tile, [kThreads]);
    SHARED(int, count, );
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    if (t == 0) count = 0;
    tile[t] = -x[first + t];
    __syncthreads();
    if (t >= 32) {
        tile[t - 32] = -tile[t - 32];
        cpu::barrier_sync(3, kThreads, "barrier");  // upper warp
    } else {
        cpu::barrier_sync(3, bug == 1 ? 32 : kThreads, "barrier");  // lower warp
        tile[t + 32] = -tile[t + 32];
        if (bug != 2) count += 1;
    }
    cpu::wait_until([&] { return count == 32; }, "the count");  // counted
    y[first + t] = tile[t];
}

// One of the kernels above, counted from 0.
EXPORT cudaError_t planted(const float* x, float* y, int blocks, int number, int bug,
                           cudaStream_t stream) {
    void (*const kernels[])(const float*, float*, int) = {
        missing_barrier, overwritten_too_early, shared_overrun, shared_overread, divergent_barrier,
        shuffle,         uninitialised,         misaligned,     local_array,     waiting};
    return LAUNCH(kernels[number], dim3(blocks), dim3(kThreads), kThreads * sizeof(float), stream)(
        x, y, bug);
}
EXPORT cudaError_t static_shared(const float* x, float* y, int blocks, int bug,
                                 cudaStream_t stream) {
    auto* kernel = bug ? static_shared_of<48 * 1024 + 1> : static_shared_of<48 * 1024>;
    return LAUNCH(kernel, dim3(blocks), dim3(kThreads), 0, stream)(x, y);
}
EXPORT cudaError_t dynamic_shared(const float* x, float* y, int blocks, int bug,
                                  cudaStream_t stream) {
    const int bytes = 227 * 1024 + bug;
    return LAUNCH(dynamic_shared_of, dim3(blocks), dim3(kThreads), bytes, stream)(x, y, bytes);
}
