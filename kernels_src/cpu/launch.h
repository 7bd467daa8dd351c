// LAUNCH: checks the configuration as the GPU would, and runs the grid's blocks on all cores.
#pragma once

#include <pthread.h>
#include <sched.h>

#include "scheduler.h"

namespace [[gnu::visibility("hidden")]] cpu {

// The clusters of one launch (of one block each, as a rule), which OS threads take in turn.
struct Queue {
    Grid& grid;
    uint64_t count;
    Sequence sequence;
    uint64_t next = 0;

    static void* work(void* argument) {
        Queue& queue = *static_cast<Queue*>(argument);
        Cluster cluster(queue.grid);
        while (!queue.grid.failure.happened()) {
            const uint64_t n = __atomic_fetch_add(&queue.next, 1, __ATOMIC_RELAXED);
            if (n >= queue.count) break;
            cluster.run(queue.sequence.at(n));
        }
        return nullptr;
    }
};

inline int core_count() {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

inline uint64_t volume(dim3 extent) { return uint64_t(extent.x) * extent.y * extent.z; }

inline void check_configuration(Grid& grid) {
    const dim3 blocks = grid.blocks, threads = grid.threads, cluster = grid.cluster_extent;
    const char* text = grid.text;
    const int length = strcspn(text, "<,");
    if (volume(blocks) == 0 || blocks.x > 0x7FFFFFFF || blocks.y > 65535 || blocks.z > 65535) {
        grid.failure.keep(
            cudaErrorInvalidConfiguration,
            "%.*s: a grid of (%u,%u,%u) blocks; from 1 to (2147483647,65535,65535) can run", length,
            text, blocks.x, blocks.y, blocks.z);
    } else if (volume(threads) == 0 || volume(threads) > kMaxThreads || threads.z > 64) {
        grid.failure.keep(
            cudaErrorInvalidConfiguration,
            "%.*s: a block of (%u,%u,%u) threads; from 1 to %d can run, at most 64 in z", length,
            text, threads.x, threads.y, threads.z, kMaxThreads);
    } else if (volume(cluster) == 0 || volume(cluster) > kMaxCluster || blocks.x % cluster.x != 0 ||
               blocks.y % cluster.y != 0 || blocks.z % cluster.z != 0) {
        grid.failure.keep(
            cudaErrorInvalidClusterSize,
            "%.*s: clusters of (%u,%u,%u) blocks; they must divide the grid of (%u,%u,%u), and "
            "%d blocks are the most",
            length, text, cluster.x, cluster.y, cluster.z, blocks.x, blocks.y, blocks.z,
            kMaxCluster);
    } else if (grid.dynamic_bytes > kSharedLimit) {
        grid.failure.keep(cudaErrorInvalidValue,
                          "%.*s: %zu bytes of dynamic shared memory; a block has at most %zu",
                          length, text, grid.dynamic_bytes, kSharedLimit);
    }
}

inline cudaError_t run_grid(Grid& grid) {
    check_configuration(grid);
    if (!grid.failure.happened()) {
        grid.cluster = static_cast<int>(volume(grid.cluster_extent));
        const uint64_t clusters = volume(grid.blocks) / grid.cluster;
        Queue queue{grid, clusters, Sequence(clusters, grid.schedule)};
        constexpr int kMaxWorkers = 64;
        pthread_t workers[kMaxWorkers];
        int started = 0;
        int useful = core_count() - 1;  // besides this OS thread
        IN_RACES(useful = 0;)           // the same race comes first each time
        while (started < useful && started < kMaxWorkers && uint64_t(started) + 1 < clusters &&
               pthread_create(&workers[started], nullptr, Queue::work, &queue) == 0) {
            ++started;
        }
        Queue::work(&queue);
        for (int i = 0; i < started; ++i) pthread_join(workers[i], nullptr);
    }
    return grid.failure.publish();
}

// A kernel with its launch configuration; calling it launches, and returns when the grid has ended.
template <typename... Parameters>
struct Launch {
    const char* text;
    void (*kernel)(Parameters...);
    dim3 blocks, threads, cluster;
    size_t shared_bytes;
    Site site;

    Launch early(bool = true) const { return *this; }  // the kernel before has always ended

    cudaError_t operator()(Parameters... arguments) const {
        auto bound = [&] { kernel(arguments...); };
        Grid grid{blocks, threads, cluster,  0, shared_bytes, nullptr, &bound,
                  text,   site,    schedule, {}};
        grid.call = [](void* kernel) { (*static_cast<decltype(bound)*>(kernel))(); };
        return run_grid(grid);
    }
};

template <typename... Parameters>
Launch<Parameters...> launch_of(const char* text, void (*kernel)(Parameters...), dim3 grid,
                                dim3 block, size_t shared_bytes, cudaStream_t,
                                Site site = Site::here()) {
    return {text, kernel, grid, block, dim3(1), shared_bytes, site};
}

template <typename... Parameters>
Launch<Parameters...> cluster_launch_of(const char* text, void (*kernel)(Parameters...), dim3 grid,
                                        dim3 block, dim3 cluster, size_t shared_bytes, cudaStream_t,
                                        Site site = Site::here()) {
    return {text, kernel, grid, block, cluster, shared_bytes, site};
}

}  // namespace cpu
