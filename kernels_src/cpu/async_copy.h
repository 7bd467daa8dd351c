// Model of cp.async. The GPU may write a copy at any time between its start and its wait; here the
// target is NaN from the start, and the copy happens in the wait, so that neither an early start
// nor a missing wait goes unseen.
#pragma once

#include "scheduler.h"

namespace [[gnu::visibility("hidden")]] cpu {

UNSEEN inline void start_copy(void* to, const void* from, int bytes, bool valid, const char* name,
                              Site site) {
    IN_RACES(const Quiet quiet;)
    Block& block = *current_block;
    Thread& thread = *current_thread;
    if (!block.shared.contains(to)) {
        block.fail(thread, site, "%s: the target %p is not in shared memory", name, to);
    }
    if (block.shared.offset_of(to) % bytes != 0 ||
        (valid && reinterpret_cast<uintptr_t>(from) % bytes != 0)) {
        block.fail(thread, site,
                   "%s: both addresses must be multiples of %d; shared 0x%x, global %p", name,
                   bytes, block.shared.offset_of(to), from);
    }
    if (thread.copy_count == thread.copy_capacity) {
        thread.copy_capacity = 2 * thread.copy_capacity + 8;
        thread.copies = static_cast<PendingCopy*>(
            realloc(thread.copies, thread.copy_capacity * sizeof(PendingCopy)));
    }
    memset(to, 0xFF, bytes);
    PendingCopy& copy = thread.copies[thread.copy_count++];
    copy = {to, from, bytes, thread.copy_group, valid, 0};
    IN_RACES(Races& races = *block.races; copy.flight = races.log_end();
             races.access(races.in_flight(Kind::Write, Agent::Copy, site), to, bytes);
             if (valid) races.access(races.by(thread, Kind::Read, site), from, bytes);)
}

UNSEEN inline void wait_copies(int pending) {
    IN_RACES(const Quiet quiet;)
    Thread& thread = *current_thread;
    int kept = 0;
    for (int i = 0; i < thread.copy_count; ++i) {
        const PendingCopy copy = thread.copies[i];
        if (copy.group >= thread.copy_group - pending) {
            thread.copies[kept++] = copy;
            continue;
        }
        IN_RACES(current_block->races->land({copy.flight, copy.flight + 1});)
        if (copy.valid) {
            memcpy(copy.to, copy.from, copy.bytes);
        } else {
            memset(copy.to, 0, copy.bytes);
        }
    }
    thread.copy_count = kept;
}

}  // namespace cpu

inline void copy_async_16(void* shared, const void* global, bool valid = true,
                          cpu::Site site = cpu::Site::here()) {
    cpu::start_copy(shared, global, 16, valid, "copy_async_16", site);
}
inline void copy_async_8(void* shared, const void* global, bool valid = true,
                         cpu::Site site = cpu::Site::here()) {
    cpu::start_copy(shared, global, 8, valid, "copy_async_8", site);
}
inline void copy_async_4(void* shared, const void* global, bool valid = true,
                         cpu::Site site = cpu::Site::here()) {
    cpu::start_copy(shared, global, 4, valid, "copy_async_4", site);
}
inline void copy_async_commit() {
    IN_RACES(const cpu::Quiet quiet;)
    ++cpu::current_thread->copy_group;
}
template <int kPending>
void copy_async_wait() {
    cpu::wait_copies(kPending);
}
