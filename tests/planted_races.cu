// Kernels that are right, and with `bug` race: test_races.py says what must be reported. Blocks
// have 128 threads, two blocks a cluster. Lines that race are marked by the letters that follow //.
#include "hopper.cuh"

#include <cuda_bf16.h>

constexpr int kThreads = 128;

// y = x reversed within the block. Every order of threads gives that with the bug, too: what is
// overwritten while others read it is the same again.
__global__ void overwritten_by_itself(const float* x, float* y, int bug) {
    SHARED(float, tile, [kThreads]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    tile[t] = x[first + t];
    __syncthreads();
    const float neighbour = tile[kThreads - 1 - t];  // R
    if (!bug) __syncthreads();
    tile[t] = x[first + t];  // W
    __syncthreads();
    y[first + t] = neighbour;
}

// y = x with neighbours exchanged. A shuffle makes lanes meet, in every order of threads, but what
// they wrote before need not be there.
__global__ void shuffle_for_barrier(const float* x, float* y, int bug) {
    SHARED(float, tile, [kThreads]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    tile[t] = x[first + t];  // W
    __shfl_sync(kFullMask, x[first + t], 0);
    if (!bug) __syncwarp();
    y[first + t] = tile[t ^ 1];  // R
}

// y = x rotated by two places, through two buffers; with the bug through one
__global__ void buffer_reused_too_early(const float* x, float* y, int bug) {
    SHARED(float, tile, [2][kThreads]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    float value = x[first + t];
    for (int turn = 0; turn < 2; ++turn) {
        float* buffer = tile[bug ? 0 : turn];
        buffer[t] = value;  // W
        __syncthreads();
        value = buffer[(t + 1) % kThreads];  // R
    }
    y[first + t] = value;
}

// y = x by cp.async; bug 1 reads before the wait, 2 reads others' copies after its own wait alone
__global__ void copied(const float* x, float* y, int bug) {
    SHARED(float, tile, [kThreads]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    copy_async_4(tile + t, x + first + t);  // W
    copy_async_commit();
    if (bug != 1) copy_async_wait<0>();
    if (bug != 2) __syncthreads();
    y[first + t] = tile[t ^ 64];  // R
    copy_async_wait<0>();
}

// y = x with halves exchanged; an integer is read that nobody has written
__global__ void unwritten(const float* x, float* y, int bug) {
    SHARED(int, flags, [kThreads]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    if (!bug || t != 3) flags[t] = 1;
    __syncthreads();
    y[first + (t ^ 64)] = x[first + t] + (flags[(t + 1) % kThreads] > 1);  // R
}

// y = x with halves exchanged. All threads set one flag in one line; with the bug to different
// values, or the first thread to another one than the rest, before it waits or as its last act.
__global__ void same_value(const float* x, float* y, int bug) {
    SHARED(int, flag, );
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    flag = bug == 1 ? t / 100 : bug == 2 ? t > 0 : 1;  // W
    __syncwarp();
    __syncthreads();
    y[first + (t ^ 64)] = x[first + t] + (flag > 9);
    __syncthreads();
    if (bug == 3) flag = t > 0;  // W
}

// y = x with halves exchanged, and a count of threads, which must not be read until all have
// counted
__global__ void counted(const float* x, float* y, int bug) {
    SHARED(int, count, );
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    if (t == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);  // W
    if (!bug) __syncthreads();
    y[first + (t ^ 64)] = x[first + t] + (count > kThreads);  // R
}

// y = x with halves exchanged; with the bug a block also writes the first element of the next
// cluster, and rightly
__global__ void written_by_two_blocks(const float* x, float* y, int bug) {
    const int t = threadIdx.x, at = blockIdx.x * kThreads + (t ^ 64);
    y[at] = x[at ^ 64];                                              // W
    if (bug && t == 0 && blockIdx.x == 1) y[at + 64] = x[at + 128];  // W
}

// y = x with halves exchanged, by way of the cluster's other block; bug 1 does not wait until it
// has begun, 2 reads before it has written, 3 lets it end while it is read
__global__ void other_block(const float* x, float* y, int bug) {
    SHARED(float, tile, [kThreads]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads, other = first ^ kThreads;
    if (bug != 1) cluster_sync();
    cluster_pointer(tile, cluster_rank() ^ 1)[t] = x[other + t];  // W
    if (bug != 2) cluster_sync();
    float value = tile[t];                                                    // R
    if (bug == 3) value = cluster_pointer(tile, cluster_rank() ^ 1)[t ^ 64];  // E
    y[first + (t ^ 64)] = value;
}

// y = x with halves exchanged, by a bulk copy. Bug 1 reads before it has arrived; 2 lets the next
// copy start while it is read; 3 has no fence between barrier_init and the copy.
__global__ void bulk_copied(const float* x, float* y, int bug) {
    SHARED(float, tile, [kThreads]);
    SHARED(Barrier, full, );
    SHARED(Barrier, empty, );
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    if (t == 0) {
        barrier_init(&full, 1);  // I
        barrier_init(&empty, kThreads);
        if (bug != 3) barrier_init_fence();
    }
    __syncthreads();
    for (int turn = 0; turn < 2; ++turn) {
        if (t == 0) {
            barrier_wait(&empty, (turn & 1) ^ 1);
            barrier_arrive_expect(&full, sizeof tile);
            copy_bulk(tile, x + first, sizeof tile, &full);  // W
        }
        if (bug != 1) barrier_wait(&full, turn & 1);
        if (bug == 2) barrier_arrive(&empty);
        y[first + (t ^ 64)] = tile[t];  // R
        if (bug != 2) barrier_arrive(&empty);
    }
}

// y = x with halves exchanged, and a wgmma of operands that are all ones. Bug 1 overwrites one
// while it is read, 2 has no fence between writing and multiplying, 3 no barrier; 4 reads a result
// too early.
__global__ void multiplied(const float* x, float* y, int bug) {
    SHARED(__nv_bfloat16, a, [64 * 16]);
    SHARED(__nv_bfloat16, b, [16 * 16]);
    const int t = threadIdx.x, first = blockIdx.x * kThreads;
    for (int i = t; i < 64 * 16; i += kThreads) a[i] = __float2bfloat16(1);  // W
    for (int i = t; i < 16 * 16; i += kThreads) b[i] = __float2bfloat16(1);
    if (bug != 2) fence_async_proxy();
    if (bug != 3) __syncthreads();
    float d[8];
    const uint64_t left = wgmma_operand(a, 128, 256), right = wgmma_operand(b, 128, 256);
    wgmma_fence();
    wgmma<__nv_bfloat16, Major::K, Major::K>(d, left, right, false);  // M
    wgmma_commit();
    const float early = bug == 4 ? d[0] : 0;  // D
    if (bug != 1) wgmma_wait<0>(d);
    if (bug != 1) __syncthreads();
    a[t] = __float2bfloat16(0);  // O
    wgmma_wait<0>(d);
    y[first + (t ^ 64)] = x[first + t] + 0 * (d[0] + early);
}

// One of the kernels above, counted from 0.
EXPORT cudaError_t planted(const float* x, float* y, int blocks, int number, int bug,
                           cudaStream_t stream) {
    void (*const kernels[])(const float*, float*, int) = {overwritten_by_itself,
                                                          shuffle_for_barrier,
                                                          buffer_reused_too_early,
                                                          copied,
                                                          unwritten,
                                                          same_value,
                                                          counted,
                                                          written_by_two_blocks,
                                                          other_block,
                                                          bulk_copied,
                                                          multiplied};
    return LAUNCH_CLUSTER(kernels[number], dim3(blocks), dim3(kThreads), dim3(2), 0, stream)(x, y,
                                                                                             bug);
}
