// Barriers of a block. CUDA defines __syncthreads only where all threads of the block reach the
// same one. The GPU does not enforce it (since sm_70 a thread that has returned does not count, and
// any two source lines can meet), so code that breaks the rule hangs or lacks an order elsewhere:
// here it is an error at once.
#pragma once

#include "scheduler.h"

namespace [[gnu::visibility("hidden")]] cpu {

// `threads` threads meet at barrier 0 to 15 of the block. 0 is that of __syncthreads; at the others
// different source lines may meet, as when one warp produces what others consume.
UNSEEN inline void barrier_sync(int number, int threads, const char* name,
                                Site site = Site::here()) {
    IN_RACES(const Quiet quiet;)
    Block& block = *current_block;
    Thread& thread = *current_thread;
    if (number < 0 || number >= kBarriers || threads < 1 || threads > block.size ||
        (number > 0 && threads % kLanes != 0)) {
        block.fail(thread, site,
                   "%s: barrier %d for %d threads, in a block of %d; there are 16, for whole warps",
                   name, number, threads, block.size);
    }
    BlockBarrier& barrier = block.barriers[number];
    if (number == 0 && block.exited > 0) {
        block.fail(
            thread, site,
            "this thread is at %s, which %d others can't reach: they returned from the kernel; "
            "let them do nothing instead",
            name, block.exited);
    }
    if (barrier.arrived == 0) {
        barrier.name = name;
        barrier.site = site;
        barrier.expected = threads;
    } else if (number == 0 && !(barrier.site == site)) {
        block.fail(thread, site,
                   "divergent barrier: this thread is at %s, while %d others wait at %s, %s:%d",
                   name, barrier.arrived, barrier.name, barrier.site.file, barrier.site.line);
    } else if (barrier.expected != threads) {
        block.fail(thread, site, "%s: barrier %d is for %d threads here, and for %d at %s:%d", name,
                   number, threads, barrier.expected, barrier.site.file, barrier.site.line);
    }
    barrier.waiting[thread.warp()] |= thread.bit();
    if (++barrier.arrived == barrier.expected) {
        block.check_guards(name, site);
        IN_RACES(if (threads == block.size) block.races->meet_block(block);
                 else block.races->meet(block, 0, block.warp_count, barrier.waiting);)
        for (int w = 0; w < block.warp_count; ++w) {
            if (barrier.waiting[w]) block.make_ready(w, barrier.waiting[w]);
            barrier.waiting[w] = 0;
        }
        barrier.arrived = 0;
    }
    block.wait(thread, name, site);
}

}  // namespace cpu

inline void __syncthreads(cpu::Site site = cpu::Site::here()) {
    cpu::barrier_sync(0, cpu::current_block->size, "__syncthreads", site);
}
