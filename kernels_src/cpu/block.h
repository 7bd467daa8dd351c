// One block: its threads, which are fibers, and what they wait for. A thread runs until it has to
// meet others (a barrier, a shuffle) and is ready again when all have come; scheduler.h runs those
// that are.
#pragma once

#include <vector_functions.h>

#include "failure.h"
#include "fiber.h"
#include "schedule.h"
#include "shared_memory.h"
#include "site.h"

namespace [[gnu::visibility("hidden")]] cpu {

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kLanes;
constexpr int kBarriers = 16;
constexpr int kMaxCluster = 8;

// What one launch asks for.
struct Grid {
    dim3 blocks, threads, cluster_extent;
    int cluster;  // blocks that run together
    size_t dynamic_bytes;
    void (*call)(void* kernel);  // calls the kernel with its arguments
    void* kernel;
    const char* text;  // begins with the kernel's name
    Site site;         // of LAUNCH
    Schedule schedule;
    Failure failure;
};

// A cp.async that has not been waited for, see async_copy.h.
struct PendingCopy {
    void* to;
    const void* from;
    int bytes, group;
    bool valid;
    uint32_t flight;  // its number among the accesses, see races.h
};

class Block;
class Races;

struct Thread {
    Fiber fiber;
    uint64_t* stack_end;  // a mark there is overwritten by a stack that is too small
    Block* block;
    uint3 index;
    int number;  // in the block
    // while it waits:
    const char* waits_for;
    Site site;
    uint32_t mask;             // the lanes it wants to meet
    void* data;                // what it brings
    bool (*condition)(void*);  // of wait_until; takes data
    // its copies in flight:
    PendingCopy* copies;
    int copy_count, copy_capacity, copy_group;
    // of races.h:
    int quiet;      // in the backend's own code, whose accesses don't count
    bool repeated;  // its last write must have changed nothing
    int held;       // its arrays that wgmma uses, and where the first begins and the last ends
    const char *held_begin, *held_end;

    UNSEEN int warp() const { return unsigned(number) / kLanes; }
    UNSEEN int lane() const { return unsigned(number) % kLanes; }
    UNSEEN uint32_t bit() const { return 1u << lane(); }
    UNSEEN bool may_hold(const void* address) const {
        return held > 0 && address >= held_begin && address < held_end;
    }
};

// Sets of lanes.
struct Warp {
    uint32_t existing;  // the last warp of a block may have fewer than 32
    uint32_t ready;     // can run
    uint32_t meeting;   // wait for other lanes
    uint32_t polling;   // wait until a condition holds
    uint32_t exited;    // have returned from the kernel
};

struct BlockBarrier {
    const char* name;
    Site site;  // of the first thread that arrived
    int arrived, expected;
    uint32_t waiting[kMaxWarps];
};

inline thread_local Block* current_block;
inline thread_local Thread* current_thread;

// Of one thread; only what is touched takes memory. Stacks lie at its multiples.
constexpr size_t kStackBytes = 256 * 1024;

#ifdef RACES
inline int held_arrays;  // by all launches of the process, see races.h
UNSEEN inline bool arrays_are_held() { return __atomic_load_n(&held_arrays, __ATOMIC_RELAXED) > 0; }

// Whether the caller has this address on its own stack. Without a look at current_thread, which
// takes longer than all else that most accesses to memory need.
[[gnu::always_inline]] UNSEEN inline bool is_own_variable(const void* address) {
    const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
    return (reinterpret_cast<uintptr_t>(address) ^ frame) < kStackBytes;
}

// While one lives, the current thread is in the backend's own code.
class Quiet {
  public:
    UNSEEN Quiet() : thread_(*current_thread) { ++thread_.quiet; }
    UNSEEN ~Quiet() { --thread_.quiet; }
    Quiet(const Quiet&) = delete;

  private:
    Thread& thread_;
};
#endif

class Block {
  public:
    Block(Grid& grid, int rank, Block** cluster);
    ~Block();
    Block(const Block&) = delete;

    void begin(uint3 index, uint64_t run);
    Thread* next_ready();
    bool poll();
    void run_from(Thread& thread);
    UNSEEN bool ended() const { return exited == size; }

    UNSEEN void make_ready(int warp, uint32_t lanes) {
        warps[warp].ready |= lanes;
        ready_warps |= 1u << warp;
    }
    // Suspends the current thread until someone makes it ready.
    UNSEEN void wait(Thread& thread, const char* what, Site site) {
        IN_RACES(const Quiet quiet; check_repeated();)
        thread.waits_for = what;
        thread.site = site;
        run_others(thread);
    }
    void run_others(Thread& thread);
    IN_RACES(static void check_repeated();)  // before the current thread lets others run
    // Ends the launch with a sentence about a thread. Called by a fiber, and never returns to it.
    [[noreturn, gnu::cold, gnu::format(printf, 4, 5)]] void fail(const Thread& thread, Site site,
                                                                 const char* format, ...);
    // The same, and goes on.
    [[gnu::cold, gnu::format(printf, 4, 5)]] void report(const Thread& thread, Site site,
                                                         const char* format, ...);
    void report(const Thread& thread, Site site, const char* format, va_list arguments);
    // Ends the launch if a shared array was written out of bounds.
    void check_guards(const char* when, Site site);

    UNSEEN bool has_on_stack(const void* address) const {
        return address >= stacks_ && address < stacks_ + stacks_bytes();
    }

    UNSEEN Thread& lane(int warp, int lane) { return threads[warp * kLanes + lane]; }

    Grid& grid;
    const int size, warp_count;
    uint3 index;
    uint64_t run;  // tells this run of a block from all others of the process
    int exited;    // threads
    Thread* threads;
    Warp warps[kMaxWarps];
    uint32_t ready_warps;  // those with a lane that can run
    BlockBarrier barriers[kBarriers];
    SharedMemory shared;

    const int rank;  // in its cluster
    Block** cluster;
    int cluster_arrived, cluster_phase;  // rank 0 counts for cluster_sync
    Races* races;                        // of the cluster, in a build that looks for them

  private:
    static constexpr uint64_t kStackEnd = 0x57ACCE0F57ACCE0F;
    static constexpr size_t kLine = 64;  // of the cache

    static void run_thread();
    void start(Thread& thread);
    void exit_thread(Thread& thread);
    void check_stack(const Thread& thread);
    // One more than threads, at the bottom: a stack that is too small runs into the next lower one.
    UNSEEN size_t stacks_bytes() const { return (size + 1) * kStackBytes; }
    UNSEEN char* stack_of(int number) const { return stacks_ + (number + 1) * kStackBytes; }
    // Stacks start at different cache lines of a page, or all tops would fall on the same sets of
    // the cache; and below its last line, where the next higher stack's mark may be.
    UNSEEN char* top_of_stack(int number) const {
        return stack_of(number + 1) - (2 + (number + 1) % 60) * kLine;
    }
    // The mark lies right above the top of the next lower stack, in a page that is in use anyway.
    UNSEEN uint64_t* end_of_stack(int number) const {
        return reinterpret_cast<uint64_t*>(top_of_stack(number - 1));
    }

    char *mapped_, *stacks_;
    Fiber scheduler_;
    int warp_;  // that has run last
    Random random_;
};

inline void Block::report(const Thread& thread, Site site, const char* format, va_list arguments) {
    char sentence[kTextBytes / 2];
    vsnprintf(sentence, sizeof sentence, format, arguments);
    grid.failure.keep(cudaErrorLaunchFailure, "block (%u,%u,%u), thread (%u,%u,%u), %s:%d: %s",
                      index.x, index.y, index.z, thread.index.x, thread.index.y, thread.index.z,
                      site.file, site.line, sentence);
}

inline void Block::report(const Thread& thread, Site site, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report(thread, site, format, arguments);
    va_end(arguments);
}

inline void Block::fail(const Thread& thread, Site site, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report(thread, site, format, arguments);
    va_end(arguments);
    for (;;) run_others(*current_thread);
}

inline void Block::check_guards(const char* when, Site site) {
    SharedMemory::Damage damage;
    if (!shared.find_damage(damage)) return;
    const bool before = damage.at < 0;
    grid.failure.keep(
        cudaErrorLaunchFailure,
        "block (%u,%u,%u), before %s, %s:%d: a write outside shared array '%s' of %zu bytes, "
        "%ld bytes %s",
        index.x, index.y, index.z, when, site.file, site.line, damage.declaration->name,
        damage.bytes, before ? -damage.at : damage.at - static_cast<long>(damage.bytes),
        before ? "before its start" : "past its end");
}

// Suspends the current thread until condition() holds. It is asked again when no thread can run; if
// it then never holds, the launch ends with an error that names `what` and the site.
template <typename Condition>
UNSEEN void wait_until(Condition condition, const char* what, Site site = Site::here()) {
    IN_RACES(const Quiet quiet;)
    if (condition()) return;
    Thread& thread = *current_thread;
    thread.data = &condition;
    thread.condition = [](void* data) { return bool((*static_cast<Condition*>(data))()); };
    current_block->warps[thread.warp()].polling |= thread.bit();
    current_block->wait(thread, what, site);
}

}  // namespace cpu

// CUDA's own names, of the thread that runs.
inline thread_local uint3 threadIdx __attribute__((visibility("hidden")));
inline thread_local uint3 blockIdx __attribute__((visibility("hidden")));
inline thread_local dim3 blockDim __attribute__((visibility("hidden")));
inline thread_local dim3 gridDim __attribute__((visibility("hidden")));
