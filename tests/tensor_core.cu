// One warp a block gives each function of tensor_core.cuh its registers from memory, and writes
// what it returns: test_tensor_core.py knows from the PTX ISA which register should hold what.
// Registers are passed as the bits of floats.
#include "tensor_core.cuh"

enum Kind { kTf32, kBf16, kFp16 };

// A fragment a block: a (32, 4), b (32, 2), and d (32, 4), which is added to.
template <Kind kKind>
__global__ void mma_kernel(const float* a, const float* b, float* d) {
    const int64_t thread = int64_t(blockIdx.x) * kWarpSize + threadIdx.x;
    uint32_t a_registers[4], b_registers[2];
    float sums[4];
    for (int i = 0; i < 4; ++i) a_registers[i] = __float_as_uint(a[thread * 4 + i]);
    for (int i = 0; i < 2; ++i) b_registers[i] = __float_as_uint(b[thread * 2 + i]);
    for (int i = 0; i < 4; ++i) sums[i] = d[thread * 4 + i];
    if constexpr (kKind == kTf32) mma_m16n8k8_tf32(sums, a_registers, b_registers);
    if constexpr (kKind == kBf16) mma_m16n8k16_bf16(sums, a_registers, b_registers);
    if constexpr (kKind == kFp16) mma_m16n8k16_fp16(sums, a_registers, b_registers);
    for (int i = 0; i < 4; ++i) d[thread * 4 + i] = sums[i];
}
EXPORT cudaError_t mma(const float* a, const float* b, float* d, int blocks, int kind,
                       cudaStream_t stream) {
    auto* kernel = kind == kTf32   ? mma_kernel<kTf32>
                   : kind == kBf16 ? mma_kernel<kBf16>
                                   : mma_kernel<kFp16>;
    return LAUNCH(kernel, dim3(blocks), dim3(kWarpSize), 0, stream)(a, b, d);
}

// rows: 32 rows of 8 16-bit values. Lane i gives the address of row order[i]; out (32, 4) is what
// the lanes get, 0 where the function has fewer registers.
__global__ void ldmatrix_kernel(const float* rows, const float* order, float* out, int matrices,
                                int transposed) {
    SHARED(float, tile, [32][12]);  // 16 bytes a row are data
    const int lane = threadIdx.x;
    for (int i = 0; i < 4; ++i) tile[lane][i] = rows[lane * 4 + i];
    __syncthreads();
    const float* row = tile[static_cast<int>(order[lane])];
    uint32_t r[4] = {}, two[2], one[1];
    if (matrices == 4) transposed ? ldmatrix_x4_trans(r, row) : ldmatrix_x4(r, row);
    if (matrices == 2) {
        transposed ? ldmatrix_x2_trans(two, row) : ldmatrix_x2(two, row);
        r[0] = two[0], r[1] = two[1];
    }
    if (matrices == 1) {
        transposed ? ldmatrix_x1_trans(one, row) : ldmatrix_x1(one, row);
        r[0] = one[0];
    }
    for (int i = 0; i < 4; ++i) out[lane * 4 + i] = __uint_as_float(r[i]);
}
EXPORT cudaError_t ldmatrix(const float* rows, const float* order, float* out, int matrices,
                            int transposed, cudaStream_t stream) {
    return LAUNCH(ldmatrix_kernel, dim3(1), dim3(kWarpSize), 0, stream)(rows, order, out, matrices,
                                                                        transposed);
}

// c (16, 8) = a (16, 16) · b (16, 8) the usual way; with the bug two registers are exchanged.
__global__ void product_kernel(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int bug) {
    SHARED(__nv_bfloat16, a_tile, [16][24]);
    SHARED(__nv_bfloat16, b_tile, [16][8]);
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += kWarpSize) a_tile[i / 16][i % 16] = a[i];
    for (int i = lane; i < 128; i += kWarpSize) b_tile[i / 8][i % 8] = b[i];
    __syncthreads();
    uint32_t left[4], right[2];
    ldmatrix_x4(left, &a_tile[lane % 16][lane / 16 * 8]);
    ldmatrix_x2_trans(right, b_tile[lane % 16]);
    const uint32_t used[4] = {left[0], left[bug ? 2 : 1], left[bug ? 1 : 2], left[3]};
    float sums[4] = {};
    mma_m16n8k16_bf16(sums, used, right);
    for (int i = 0; i < 4; ++i) {
        c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
    }
}
EXPORT cudaError_t product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int bug,
                           cudaStream_t stream) {
    return LAUNCH(product_kernel, dim3(1), dim3(kWarpSize), 0, stream)(a, b, c, bug);
}

// out = x through a ring of three slots in shared memory, piece by piece; in the last piece only
// `count` elements are valid, and the others are 0. Bug 1: no wait; 2: one group too few waited
// for.
template <int kBytes>
__global__ void copy_kernel(const float* x, float* out, int pieces, int count, int bug) {
    constexpr int kFloats = kBytes / 4, kPiece = kWarpSize * kFloats;
    SHARED(float, ring, [3][kPiece]);
    const int mine = threadIdx.x * kFloats;
    auto start = [&](int piece) {
        if (piece < pieces) {
            float* to = &ring[piece % 3][mine];
            const float* from = x + piece * kPiece + mine;
            const bool valid = piece < pieces - 1 || mine < count;
            if constexpr (kBytes == 16) copy_async_16(to, from, valid);
            if constexpr (kBytes == 8) copy_async_8(to, from, valid);
            if constexpr (kBytes == 4) copy_async_4(to, from, valid);
        }
        copy_async_commit();  // an empty group at the end, so that the count stays right
    };
    start(0);
    start(1);
    for (int piece = 0; piece < pieces; ++piece) {
        if (bug == 0) copy_async_wait<1>();
        if (bug == 2) copy_async_wait<2>();
        __syncthreads();
        for (int i = 0; i < kFloats; ++i) {  // another thread's element
            const int at = (mine + i + 5) % kPiece;
            out[piece * kPiece + at] = ring[piece % 3][at];
        }
        start(piece + 2);
    }
    copy_async_wait<0>();
}
EXPORT cudaError_t copy(const float* x, float* out, int bytes, int pieces, int count, int bug,
                        cudaStream_t stream) {
    auto* kernel = bytes == 16 ? copy_kernel<16> : bytes == 8 ? copy_kernel<8> : copy_kernel<4>;
    return LAUNCH(kernel, dim3(1), dim3(kWarpSize), 0, stream)(x, out, pieces, count, bug);
}

// Of each x: to_tf32, both parts of split_tf32, exp2_approx; of each pair of neighbours: pack_bf16
// and the three terms of split_bf16. out (n, 8).
__global__ void conversions_kernel(const float* x, float* out, int n) {
    const int i = blockIdx.x * kWarpSize + threadIdx.x;
    if (i < n) {
        uint32_t big, small, terms[3];
        split_tf32(x[i], big, small);
        split_bf16(x[i], x[(i + 1) % n], terms);
        float* own = out + i * 8;
        own[0] = __uint_as_float(to_tf32(x[i]));
        own[1] = __uint_as_float(big);
        own[2] = __uint_as_float(small);
        own[3] = exp2_approx(x[i]);
        own[4] = __uint_as_float(pack_bf16(x[i], x[(i + 1) % n]));
        for (int term = 0; term < 3; ++term) own[5 + term] = __uint_as_float(terms[term]);
    }
}
EXPORT cudaError_t conversions(const float* x, float* out, int n, cudaStream_t stream) {
    return LAUNCH(conversions_kernel, dim3(ceil_div(n, kWarpSize)), dim3(kWarpSize), 0, stream)(
        x, out, n);
}

// What is wrong with a copy: 0 a target outside shared memory, 1 a misaligned target, 2 a
// misaligned source, 3 an mma by half a warp, 4 a row for ldmatrix that is not in shared memory.
__global__ void misuse_kernel(const float* x, float* out, int which) {
    SHARED(float, tile, [64]);
    if (which == 0) copy_async_16(out, x);
    if (which == 1) copy_async_16(tile + 1, x);
    if (which == 2) copy_async_16(tile, x + 1);
    if (which == 3 && threadIdx.x < 16) {
        float d[4] = {};
        const uint32_t a[4] = {}, b[2] = {};
        mma_m16n8k8_tf32(d, a, b);
    }
    if (which == 4) {
        uint32_t r[4];
        ldmatrix_x4(r, x);
    }
    __syncthreads();
}
EXPORT cudaError_t misuse(const float* x, float* out, int which, cudaStream_t stream) {
    return LAUNCH(misuse_kernel, dim3(1), dim3(kWarpSize), 0, stream)(x, out, which);
}
