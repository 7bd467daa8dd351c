// What the CPU backend has to do as the GPU does it: test_cpu_backend.py runs these on either.
#include "cuda.cuh"

// Every thread writes where it is, 8 floats: blockIdx, threadIdx, blockDim.x and gridDim.x.
__global__ void indices_kernel(float* out) {
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    float* own = out + (int64_t(block) * threads + thread) * 8;
    own[0] = blockIdx.x, own[1] = blockIdx.y, own[2] = blockIdx.z, own[6] = blockDim.x;
    own[3] = threadIdx.x, own[4] = threadIdx.y, own[5] = threadIdx.z, own[7] = gridDim.x;
}
EXPORT cudaError_t indices(float* out, int blocks_x, int blocks_y, int blocks_z, int threads_x,
                           int threads_y, int threads_z, cudaStream_t stream) {
    return LAUNCH(indices_kernel, dim3(blocks_x, blocks_y, blocks_z),
                  dim3(threads_x, threads_y, threads_z), 0, stream)(out);
}

// Of one warp's values and a number of lanes: what each lane has after each of the shuffles and
// votes.
__global__ void warp_functions_kernel(const float* x, float* out, int distance, int width) {
    const int lane = threadIdx.x;
    const float value = x[lane];
    float* own = out + lane * 9;
    own[0] = __shfl_sync(kFullMask, value, lane + distance, width);
    own[1] = __shfl_up_sync(kFullMask, value, distance, width);
    own[2] = __shfl_down_sync(kFullMask, value, distance, width);
    own[3] = __shfl_xor_sync(kFullMask, value, distance, width);
    own[4] = __popc(__ballot_sync(kFullMask, value > 0) >> lane);
    own[5] = __any_sync(kFullMask, value > 2) * 2 + __all_sync(kFullMask, value > -2);
    own[6] = warp_sum(value);
    own[7] = warp_max(value);
    // the two halves of the warp, each for itself
    const uint32_t half = lane < 16 ? 0xFFFF : 0xFFFF0000;
    own[8] = 0;
    if (lane < 16) own[8] = __shfl_xor_sync(half, value, 1);
    if (lane >= 16) own[8] = __shfl_xor_sync(half, value, 2);
    __syncwarp(half);
}
EXPORT cudaError_t warp_functions(const float* x, float* out, int distance, int width,
                                  cudaStream_t stream) {
    return LAUNCH(warp_functions_kernel, dim3(1), dim3(kWarpSize), 0, stream)(x, out, distance,
                                                                              width);
}

// A block that ends within a warp: the lanes that exist meet. Every out is the sum of all x.
__global__ void partial_warp_kernel(const float* x, float* out, int threads) {
    float sum = 0;
    for (int lane = 0; lane < threads; ++lane) {
        sum += __shfl_sync(kFullMask, x[threadIdx.x], lane);
    }
    out[threadIdx.x] = sum;
}
EXPORT cudaError_t partial_warp(const float* x, float* out, int threads, cudaStream_t stream) {
    return LAUNCH(partial_warp_kernel, dim3(1), dim3(threads), 0, stream)(x, out, threads);
}

// total += 1 in every thread; of the integers, the largest and smallest thread number, and the
// total again, counted in shared memory first.
__global__ void atomics_kernel(float* total, int* integers) {
    SHARED(int, in_block, );
    if (threadIdx.x == 0) in_block = 0;
    __syncthreads();
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&in_block, 1);
    atomicAdd(total, 1);
    atomicMax(&integers[0], thread);
    atomicMin(&integers[1], thread);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&integers[2], in_block);
}
EXPORT cudaError_t atomics(float* total, float* integers, int blocks, int threads,
                           cudaStream_t stream) {
    return LAUNCH(atomics_kernel, dim3(blocks), dim3(threads), 0, stream)(
        total, reinterpret_cast<int*>(integers));
}

// The threads of a block in the order in which they come to each of some turns, one after another.
__global__ void order_kernel(float* out, int* count, int turns) {
    for (int turn = 0; turn < turns; ++turn) {
        out[atomicAdd(count, 1)] = threadIdx.x;
        __syncwarp();
    }
}
EXPORT cudaError_t order(float* out, float* count, int threads, int turns, cudaStream_t stream) {
    return LAUNCH(order_kernel, dim3(1), dim3(threads), 0, stream)(
        out, reinterpret_cast<int*>(count), turns);
}

// out[i] = the sum over x of i's block, 20 barriers and 60 shuffles a thread: for the backend's
// speed.
__global__ void busy_kernel(const float* x, float* out) {
    SHARED(float, scratch, [8]);
    const int at = blockIdx.x * 256 + threadIdx.x;
    float sum = 0;
    for (int turn = 0; turn < 10; ++turn) sum = block_sum(x[at], scratch);
    out[at] = sum;
}
EXPORT cudaError_t busy(const float* x, float* out, int blocks, cudaStream_t stream) {
    return LAUNCH(busy_kernel, dim3(blocks), dim3(256), 0, stream)(x, out);
}

// Two arrays of one name and size are two; the same declaration reached twice is one.
__device__ float& slot() {
    SHARED(float, value, );
    return value;
}
__device__ float& other_slot() {
    SHARED(float, value, );
    return value;
}
__global__ void shared_arrays_kernel(float* out) {
    if (threadIdx.x == 0) slot() = blockIdx.x;
    if (threadIdx.x == 1) other_slot() = -1;
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = 10 * slot() + other_slot();
}
EXPORT cudaError_t shared_arrays(float* out, int blocks, int threads, cudaStream_t stream) {
    return LAUNCH(shared_arrays_kernel, dim3(blocks), dim3(threads), 0, stream)(out);
}

// The first error of a chain is what the function returns.
EXPORT cudaError_t chain(float* out, int first_blocks, int second_blocks, cudaStream_t stream) {
    if (cudaError_t error =
            LAUNCH(shared_arrays_kernel, dim3(first_blocks), dim3(32), 0, stream)(out)) {
        return error;
    }
    return LAUNCH(shared_arrays_kernel, dim3(second_blocks), dim3(32), 0, stream)(out);
}
