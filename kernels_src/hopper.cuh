// Hopper's own instructions (sm_90a), one thin function each: wgmma, mbarriers, bulk copies,
// clusters and named barriers. tensor_core.cuh has what older cards know too. Compiled by g++ the
// same functions are models (cpu/hopper.h) that decode descriptors and count barriers as PTX says.
//
// wgmma's operands in shared memory consist of core matrices, 8 rows of 16 bytes in one piece of
// 128 bytes, without swizzle. What a row holds is the operand's major dimension:
//     Major::K   element (mn, k) lies (mn % 8) * 16 + (k % 8) * 2 bytes into its core
//     Major::MN  element (mn, k) lies (k % 8) * 16 + (mn % 8) * 2 bytes into its core
// The core itself lies (k / 8) * k_stride + (mn / 8) * mn_stride bytes from the start: both strides
// are free multiples of 16. Of the result (64 x N) thread t of 128 holds in d[4 * j + 2 * half + e]
//     row 16 * (t / 32) + 8 * half + t % 32 / 4, column 8 * j + 2 * (t % 4) + e.
#pragma once

#include "tensor_core.cuh"

#include <cuda_fp16.h>

#include <type_traits>

// A block gets registers for its threads when it starts, as many for each, a multiple of 8, and
// shares them anew with registers_decrease and registers_increase. What would exceed them waits,
// for ever if no warp gives some back: whether so many warps with so many registers a thread fit.
constexpr bool registers_suffice(int loading_warps, int decreased, int multiplying_warps,
                                 int increased) {
    const int threads = (loading_warps + multiplying_warps) * kWarpSize;
    const int at_start = 65536 / threads / 8 * 8 * threads;
    return (loading_warps * decreased + multiplying_warps * increased) * kWarpSize <= at_start;
}

enum class Major { K = 0, MN = 1 };
using Barrier = uint64_t;  // an mbarrier in shared memory; starts in phase 0

#ifdef __CUDACC__

// Of the current device: a persistent kernel launches as many blocks.
inline int multiprocessors() {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
}

// Clusters of so many blocks that run at a time; a persistent kernel launches as many. It may be
// fewer than multiprocessors() allow, as a cluster's blocks are neighbours on the chip.
template <typename... Parameters>
int resident_clusters(void (*kernel)(Parameters...), int blocks, int threads, size_t shared_bytes) {
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(blocks), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    int count = 0;
    gpu::allow_shared_bytes(reinterpret_cast<const void*>(kernel), shared_bytes);
    cudaOccupancyMaxActiveClusters(&count, kernel, &config);
    return count > 0 ? count : 1;
}

// ---- wgmma: asynchronous products of a warpgroup (4 warps, the first one's index divisible by 4)

// The address field of an operand; the strides between its cores are in bytes.
__device__ inline uint64_t wgmma_operand(const void* start, uint32_t k_stride, uint32_t mn_stride) {
    return (shared_address(start) & 0x3FFFF) >> 4 | uint64_t(k_stride >> 4) << 16 |
           uint64_t(mn_stride >> 4) << 32;
}

// The operand `bytes` further on in shared memory, for less than wgmma_operand takes.
__device__ inline uint64_t wgmma_advance(uint64_t operand, int bytes) {
    return operand + (bytes >> 4);
}

// Before the first wgmma, and after ordinary code wrote registers that a wgmma reads.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kPending of the committed groups still run.
template <int kPending>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The same, and what reads d, a result of those that have ended, stays behind the wait.
template <int kPending, int kLength>
__device__ inline void wgmma_wait(float (&d)[kLength]) {
    wgmma_wait<kPending>();
#pragma unroll
    for (int i = 0; i < kLength; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// wgmma<T, kMajorA, kMajorB>(d, a, b, accumulate): d (64 x N) = A (64 x 16) · B (16 x N), plus d if
// accumulate. N is twice d's length, T is __nv_bfloat16 or __half, a and b come from wgmma_operand.
// wgmma<T, kMajorB>(d, a, b, accumulate) takes A from registers: a is the A fragment of
// mma_m16n8k16, rows 16 * (t / 32) + … of the warpgroup.
#define FLOATS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLOATS_8(i) FLOATS_4(i), FLOATS_4(i + 4)
#define FLOATS_16(i) FLOATS_8(i), FLOATS_8(i + 8)
#define FLOATS_32(i) FLOATS_16(i), FLOATS_16(i + 16)
#define FLOATS_64(i) FLOATS_32(i), FLOATS_32(i + 32)
#define FLOATS_128(i) FLOATS_64(i), FLOATS_64(i + 64)
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 NAMES_4 ", %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 \
    NAMES_16     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                       \
    NAMES_32                                                                           \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128                                                                                \
    NAMES_64                                                                                     \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"           \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"           \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110"     \
    ", %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125" \
    ", %126, %127"
// o0 … are the operands that follow the result's: COUNT, COUNT + 1, …
#define WGMMA_SHARED(N, COUNT, TYPE, o0, o1, o2, o3, o4)                            \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " o2                               \
                 ", 0;\n"                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE    \
                 " {" NAMES_##COUNT "}, " o0 ", " o1 ", p, 1, 1, " o3 ", " o4 "; }" \
                 : FLOATS_##COUNT(0)                                                \
                 : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kMajorA)), "n"(int(kMajorB)))
#define WGMMA_REGISTERS(N, COUNT, TYPE, o0, o1, o2, o3, o4, o5, o6)                          \
    asm volatile("{ .reg .pred p; setp.ne.b32 p, " o5                                        \
                 ", 0;\n"                                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE             \
                 " {" NAMES_##COUNT                                                          \
                 "}, "                                                                       \
                 "{" o0 ", " o1 ", " o2 ", " o3 "}, " o4 ", p, 1, 1, " o6 "; }"              \
                 : FLOATS_##COUNT(0)                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), \
                   "n"(int(kMajorB)))
#define DEFINE_WGMMA(N, COUNT, o0, o1, o2, o3, o4, o5, o6)                                     \
    template <typename T, Major kMajorA, Major kMajorB>                                        \
    __device__ inline void wgmma(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate) { \
        if constexpr (std::is_same_v<T, __half>) {                                             \
            WGMMA_SHARED(N, COUNT, "f16", o0, o1, o2, o3, o4);                                 \
        } else {                                                                               \
            WGMMA_SHARED(N, COUNT, "bf16", o0, o1, o2, o3, o4);                                \
        }                                                                                      \
    }                                                                                          \
    template <typename T, Major kMajorB>                                                       \
    __device__ inline void wgmma(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b,        \
                                 bool accumulate) {                                            \
        if constexpr (std::is_same_v<T, __half>) {                                             \
            WGMMA_REGISTERS(N, COUNT, "f16", o0, o1, o2, o3, o4, o5, o6);                      \
        } else {                                                                               \
            WGMMA_REGISTERS(N, COUNT, "bf16", o0, o1, o2, o3, o4, o5, o6);                     \
        }                                                                                      \
    }
DEFINE_WGMMA(8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
DEFINE_WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
DEFINE_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
DEFINE_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
DEFINE_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
DEFINE_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
// attention's V with a column more
#define FLOATS_12(i) FLOATS_8(i), FLOATS_4(i + 8)
#define FLOATS_20(i) FLOATS_16(i), FLOATS_4(i + 16)
#define FLOATS_36(i) FLOATS_32(i), FLOATS_4(i + 32)
#define NAMES_12 NAMES_8 ", %8, %9, %10, %11"
#define NAMES_20 NAMES_16 ", %16, %17, %18, %19"
#define NAMES_36 NAMES_32 ", %32, %33, %34, %35"
DEFINE_WGMMA(24, 12, "%12", "%13", "%14", "%15", "%16", "%17", "%18")
DEFINE_WGMMA(40, 20, "%20", "%21", "%22", "%23", "%24", "%25", "%26")
DEFINE_WGMMA(72, 36, "%36", "%37", "%38", "%39", "%40", "%41", "%42")

// ---- mbarriers: a phase ends when all arrivals and all announced bytes are in

__device__ inline void barrier_init(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}
// After barrier_init, before a __syncthreads or cluster_sync that lets others use the barrier.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}
// One arrival, and the phase lasts until bulk copies have brought that many bytes.
__device__ inline void barrier_arrive_expect(Barrier* barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}
// An arrival at the same barrier of the cluster's block `rank`, which may be the caller's own. It
// orders what wgmma and bulk copies have read, not ordinary writes (no fence of the cluster's
// scope, which would cost a round trip to L2).
__device__ inline void barrier_arrive_remote(Barrier* barrier, uint32_t rank) {
    asm volatile(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}
// Until the phase of this parity (0 for the first) has ended; at once if the phase before it runs,
// as parity 1 on a new barrier.
__device__ inline void barrier_wait(Barrier* barrier, int parity) {
    uint32_t ended = 0;
    while (!ended) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p; }"
            : "=r"(ended)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    }
}

// ---- bulk copies: one thread starts the copy of one contiguous piece; addresses and bytes are
// multiples of 16, and the barrier gets the bytes when they have arrived

__device__ inline void copy_bulk(void* shared, const void* global, uint32_t bytes,
                                 Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
// To the same place in each of the cluster's blocks whose bit is set in `blocks`; each gets its
// bytes counted on its own barrier.
__device__ inline void copy_bulk_multicast(void* shared, const void* global, uint32_t bytes,
                                           Barrier* barrier, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
}
// Ordinary writes to shared memory before this are seen by wgmma and bulk copies after it (and
// after the barrier that orders the threads).
__device__ inline void fence_async_proxy() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- kernels that overlap: one that is launched with early() starts when all blocks of the kernel
// before it have called next_kernel_may_start or ended, and resources are free

__device__ inline void next_kernel_may_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Until the kernel before has ended and all that it wrote can be seen. Of the one before that it
// says so only if the kernel before has waited too.
__device__ inline void wait_for_previous_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- blocks of a cluster, groups of warps

__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of all blocks of the cluster.
__device__ inline void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}
// The same place in the shared memory of the cluster's block `rank`, for ordinary loads and stores
// between two cluster_sync: the block must have started, and not have ended.
template <typename T>
__device__ inline T* cluster_pointer(T* shared, uint32_t rank) {
    uint64_t address;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(shared), "r"(rank));
    return reinterpret_cast<T*>(address);
}
// `threads` threads of the block, whole warps; index 1 to 15 (0 is __syncthreads).
__device__ inline void named_barrier(int index, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}
// Gives registers back to, or takes them from, the block's pool; every warp of a warpgroup calls
// it.
template <int kRegisters>
__device__ inline void registers_decrease() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void registers_increase() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#else
#include "cpu/hopper.h"
#endif
