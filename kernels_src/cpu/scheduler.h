// Runs the fibers of a block, or of the blocks of one cluster, in the order of the launch's
// schedule.
#pragma once

#include <stdlib.h>
#include <sys/mman.h>

#include "block.h"
#ifdef RACES
#include "races.h"
#endif

namespace [[gnu::visibility("hidden")]] cpu {

inline Block::Block(Grid& launched, int own_rank, Block** blocks)
    : grid(launched),
      size(launched.threads.x * launched.threads.y * launched.threads.z),
      warp_count((size + kLanes - 1) / kLanes),
      rank(own_rank),
      cluster(blocks) {
    threads = static_cast<Thread*>(calloc(size, sizeof(Thread)));
    mapped_ = static_cast<char*>(mmap(nullptr, stacks_bytes() + kStackBytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (mapped_ == MAP_FAILED) {
        grid.failure.keep(cudaErrorMemoryAllocation,
                          "no address space for the stacks of %d threads", size);
        return;
    }
    stacks_ = mapped_ + -reinterpret_cast<uintptr_t>(mapped_) % kStackBytes;
    madvise(stacks_, stacks_bytes(), MADV_NOHUGEPAGE);
    for (int i = 0; i < size; ++i) {
        threads[i].block = this;
        threads[i].number = i;
        threads[i].stack_end = end_of_stack(i);
        *threads[i].stack_end = kStackEnd;
    }
}

inline Block::~Block() {
    for (int i = 0; i < size; ++i) free(threads[i].copies);
    free(threads);
    if (mapped_ == MAP_FAILED) return;
    allow(stacks_, stacks_bytes());
    munmap(mapped_, stacks_bytes() + kStackBytes);
}

inline void Block::begin(uint3 own_index, uint64_t own_run) {
    index = own_index;
    run = own_run;
    random_ =
        Random(grid.schedule.seed ^ (uint64_t(index.z) << 42 | uint64_t(index.y) << 21 | index.x));
    warp_ = random_.below(warp_count);
    ready_warps = exited = cluster_arrived = cluster_phase = 0;
    memset(barriers, 0, sizeof barriers);
    memset(warps, 0, sizeof warps);
    shared.begin(grid.dynamic_bytes);
    const dim3 extent = grid.threads;
    for (int i = 0; i < size; ++i) {
        Thread& thread = threads[i];
        thread.index = make_uint3(i % extent.x, i / extent.x % extent.y, i / extent.x / extent.y);
        thread.copy_count = thread.copy_group = thread.quiet = 0;
        thread.repeated = false;
        thread.held = 0;
        warps[thread.warp()].existing |= thread.bit();
        make_ready(thread.warp(), thread.bit());
        char* stack = stack_of(i);
        thread.fiber.prepare(stack, top_of_stack(i) - stack, run_thread);
    }
}

// A fiber starts here.
inline void Block::run_thread() {
    Block& block = *current_block;
    Thread& thread = *current_thread;
    thread.fiber.entered();
    block.grid.call(block.grid.kernel);
    block.exit_thread(thread);
    for (;;) block.run_others(thread);
}

UNSEEN inline void Block::exit_thread(Thread& thread) {
    IN_RACES(const Quiet quiet; check_repeated();)
    ++exited;
    Warp& warp = warps[thread.warp()];
    warp.exited |= thread.bit();
    if (barriers[0].arrived > 0) {
        fail(thread, barriers[0].site,
             "this thread returned from the kernel while %d others wait for it at %s; let it "
             "do nothing "
             "instead",
             barriers[0].arrived, barriers[0].name);
    }
    for (uint32_t left = warp.meeting; left; left &= left - 1) {
        const Thread& other = lane(thread.warp(), lowest_bit(left));
        if (other.mask & thread.bit()) {
            fail(thread, other.site,
                 "this thread returned from the kernel while lane %d of its warp waits for it "
                 "at %s with "
                 "mask 0x%08x",
                 other.lane(), other.waits_for, other.mask);
        }
    }
}

// A random order leaves a warp that can go on in one step of 32, so that any order is possible, and
// the stacks of the next threads are mostly in the cache.
UNSEEN inline Thread* Block::next_ready() {
    if (ready_warps == 0) return nullptr;
    const Order order = grid.schedule.order;
    const bool stays = order == Order::Random && ready_warps >> warp_ & 1 && random_.below(32) > 0;
    if (!stays) warp_ = choose_bit(ready_warps, order, random_);
    return &lane(warp_, choose_bit(warps[warp_].ready, order, random_));
}

// Makes ready those whose condition has come to hold; says whether there are any.
UNSEEN inline bool Block::poll() {
    bool any = false;
    for (int w = 0; w < warp_count; ++w) {
        for (uint32_t left = warps[w].polling; left; left &= left - 1) {
            Thread& thread = lane(w, lowest_bit(left));
            if (!thread.condition(thread.data)) continue;
            warps[w].polling &= ~thread.bit();
            make_ready(w, thread.bit());
            any = true;
        }
    }
    return any;
}

// Makes a thread that is ready the current one.
UNSEEN inline void Block::start(Thread& thread) {
    Warp& warp = warps[thread.warp()];
    warp.ready &= ~thread.bit();
    if (warp.ready == 0) ready_warps &= ~(1u << thread.warp());
    current_thread = &thread;
    threadIdx = thread.index;
}

// Runs a thread and those that follow it, until none is ready.
UNSEEN inline void Block::run_from(Thread& thread) {
    current_block = this;
    blockIdx = index;
    start(thread);
    scheduler_.switch_to(thread.fiber);
    IN_RACES(current_thread = nullptr;)  // what the scheduler does is of no thread
}

// The current thread hands over to the next one: a switch less than by way of the scheduler. Not
// inlined, or it would be compiled again for every kind of meeting.
[[gnu::noinline]] UNSEEN inline void Block::run_others(Thread& thread) {
    check_stack(thread);
    Thread* next = grid.failure.happened() ? nullptr : next_ready();
    if (next) start(*next);
    if (next != &thread) thread.fiber.switch_to(next ? next->fiber : scheduler_);
}

UNSEEN inline void Block::check_stack(const Thread& thread) {
    if (*thread.stack_end == kStackEnd) return;
    grid.failure.keep(cudaErrorLaunchFailure,
                      "block (%u,%u,%u), thread (%u,%u,%u): local variables of more than %zu bytes",
                      index.x, index.y, index.z, thread.index.x, thread.index.y, thread.index.z,
                      kStackBytes);
    *thread.stack_end = kStackEnd;
}

class Cluster {
  public:
    explicit Cluster(Grid& grid) : grid_(grid) {
        for (int i = 0; i < grid.cluster; ++i) blocks_[i] = new Block(grid, i, blocks_);
    }
    ~Cluster() {
        for (int i = 0; i < grid_.cluster; ++i) delete blocks_[i];
    }
    Cluster(const Cluster&) = delete;

    // Runs the n-th cluster of the grid; an error ends it early.
    UNSEEN void run(uint64_t n) {
        begin(n);
        while (!grid_.failure.happened()) {
            bool running = false, woken = false;
            for (int i = 0; i < grid_.cluster; ++i) {
                Block& block = *blocks_[sequence_.at(i)];
                if (Thread* thread = block.next_ready()) block.run_from(*thread);
                if (grid_.failure.happened()) return;
            }
            for (int i = 0; i < grid_.cluster; ++i) {
                woken |= blocks_[i]->poll();
                running |= !blocks_[i]->ended();
            }
            if (!running) return end();
            if (!woken) report_stuck();
        }
    }

  private:
    void begin(uint64_t n) {
        static uint64_t runs = 0;
        const dim3 extent = grid_.cluster_extent;
        const uint64_t columns = grid_.blocks.x / extent.x, rows = grid_.blocks.y / extent.y;
        sequence_ = Sequence(grid_.cluster, {grid_.schedule.order, grid_.schedule.seed + n});
        for (int i = 0; i < grid_.cluster; ++i) {
            const uint3 index = make_uint3(n % columns * extent.x + i % extent.x,
                                           n / columns % rows * extent.y + i / extent.x % extent.y,
                                           n / columns / rows * extent.z + i / extent.x / extent.y);
            blocks_[i]->begin(index, __atomic_add_fetch(&runs, 1, __ATOMIC_RELAXED));
        }
        blockDim = grid_.threads;
        gridDim = grid_.blocks;
        IN_RACES(races_.begin();)
    }
    void end() {
        for (int i = 0; i < grid_.cluster; ++i)
            blocks_[i]->check_guards("its end", {"the kernel", 0});
        IN_RACES(races_.end();)
    }
    void report_stuck();

    Grid& grid_;
    Block* blocks_[kMaxCluster];
    Sequence sequence_{1, {}};
    IN_RACES(Races races_{grid_, blocks_};)
};

// Nobody can run: names a thread that waits, how many do so with it, and what others do.
inline void Cluster::report_stuck() {
    const Block* block = nullptr;
    const Thread *first = nullptr, *other = nullptr;
    int alike = 0, exited = 0;
    for (int b = 0; b < grid_.cluster; ++b) {
        exited += blocks_[b]->exited;
        for (int i = 0; i < blocks_[b]->size; ++i) {
            const Thread& thread = blocks_[b]->threads[i];
            if (blocks_[b]->warps[thread.warp()].exited & thread.bit()) continue;
            if (!first) first = &thread, block = blocks_[b];
            if (thread.waits_for == first->waits_for && thread.site == first->site) {
                ++alike;
            } else if (!other) {
                other = &thread;
            }
        }
    }
    char rest[256] = "";
    if (other) {
        snprintf(rest, sizeof rest, "; thread (%u,%u,%u) waits at %s, %s:%d", other->index.x,
                 other->index.y, other->index.z, other->waits_for, other->site.file,
                 other->site.line);
    }
    grid_.failure.keep(
        cudaErrorLaunchTimeout,
        "block (%u,%u,%u), thread (%u,%u,%u), %s:%d: %d threads wait at %s for ever; %d have "
        "returned from the kernel%s",
        block->index.x, block->index.y, block->index.z, first->index.x, first->index.y,
        first->index.z, first->site.file, first->site.line, alike, first->waits_for, exited, rest);
}

}  // namespace cpu
