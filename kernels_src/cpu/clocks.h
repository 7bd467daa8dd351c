// What each thread of a cluster has seen of the others. A thread has a time, which moves on
// whenever it synchronises, and a clock: for every thread the time up to which it has seen what
// that one did. A second half of the clock says up to which time that one's writes are past a
// fence_async_proxy.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "block.h"

namespace [[gnu::visibility("hidden")]] cpu {

using Time = uint32_t;

// Threads are numbered through the blocks of the cluster.
class Clocks {
  public:
    Clocks(int block_threads, int blocks) : size_(block_threads), total_(block_threads * blocks) {
        clocks_ = static_cast<Time*>(calloc(total_ + 1, bytes()));
        joint_ = of(total_);
    }
    ~Clocks() { free(clocks_); }
    Clocks(const Clocks&) = delete;

    UNSEEN int length() const { return 2 * total_; }
    UNSEEN Time* of(uint32_t thread) const { return clocks_ + size_t(thread) * 2 * total_; }
    UNSEEN Time now(uint32_t thread) const { return of(thread)[thread]; }
    UNSEEN void advance(uint32_t thread) { of(thread)[thread] = ++time_; }

    // Whether a thread of block `rank` with this clock has seen what the other one did at a time.
    UNSEEN bool has_seen(const Time* clock, int rank, uint32_t other, Time time) const {
        return time <= settled_ || time <= seen(clock, rank, other);
    }
    // Whether it has seen anything of a block since that time; and whether any of a block's threads
    // has seen what a thread did.
    UNSEEN bool has_heard_from(const Time* clock, int other_rank, Time time) const {
        for (int i = 0; i < size_; ++i) {
            if (clock[other_rank * size_ + i] >= time) return true;
        }
        return settled_ >= time;
    }
    UNSEEN bool is_seen_in(int other_rank, uint32_t thread, Time time) const {
        for (int i = 0; i < size_; ++i) {
            if (has_seen(of(other_rank * size_ + i), other_rank, thread, time)) return true;
        }
        return false;
    }
    UNSEEN bool has_seen_past_fence(const Time* clock, uint32_t other, Time time) const {
        return time <= clock[total_ + other];
    }
    UNSEEN bool all_have_seen(Time time) const { return time <= settled_; }

    // Lanes of warps, of which `first` is the first one's first thread, have met.
    UNSEEN void meet(uint32_t first, int warps, const uint32_t* lanes) {
        const auto takes_part = [lanes](int i)
                                    UNSEEN { return lanes[i / kLanes] >> i % kLanes & 1; };
        memset(joint_, 0, bytes());
        for (int i = 0; i < warps * kLanes; ++i) {
            if (takes_part(i)) add(joint_, of(first + i));
        }
        ++time_;
        for (int i = 0; i < warps * kLanes; ++i) {
            if (!takes_part(i)) continue;
            memcpy(of(first + i), joint_, bytes());
            of(first + i)[first + i] = time_;
        }
    }
    // A whole block, or all blocks, have met. Within a block of its own nothing need be copied: all
    // have seen everything until now.
    UNSEEN void meet_all(uint32_t first, int count) {
        if (fences_ || count < total_ || total_ > size_) {
            memset(joint_, 0, bytes());
            for (uint32_t thread = first; thread < first + count; ++thread) add(joint_, of(thread));
            for (uint32_t thread = first; thread < first + count; ++thread) {
                memcpy(of(thread), joint_, bytes());
            }
        }
        settle(first, count);
    }
    // The same, of what nobody has a clock of.
    UNSEEN void settle(uint32_t first, int count) {
        for (int i = 0; i < count; i += size_) settled_of_[(first + i) / size_] = time_;
        if (count == total_) settled_ = time_;
        ++time_;
        for (uint32_t thread = first; thread < first + count; ++thread) of(thread)[thread] = time_;
    }
    UNSEEN void settle() { settle(0, total_); }

    // What any lane of a warp has seen; until the next call.
    UNSEEN const Time* of_warp(uint32_t first) {
        if (joint_of_ == first && joined_at_ == time_) return joint_;
        memset(joint_, 0, bytes());
        for (int lane = 0; lane < kLanes; ++lane) add(joint_, of(first + lane));
        joint_of_ = first;
        joined_at_ = time_;
        return joint_;
    }
    // The lanes of a warp have seen what its first has.
    UNSEEN void show_to_warp(uint32_t first) {
        for (int lane = 1; lane < kLanes; ++lane) of(first + lane)[first] = now(first);
        advance(first);
    }

    UNSEEN void fence(uint32_t thread) {
        Time* clock = of(thread);
        for (int i = 0; i < total_; ++i) clock[total_ + i] = seen(clock, thread / size_, i);
        advance(thread);
        fences_ = true;
    }

    // A clock that is not a thread's gets what a thread has seen, and passes it on.
    UNSEEN void give(uint32_t thread, Time* to) {
        const Time* clock = of(thread);
        for (int i = 0; i < total_; ++i) {
            const Time time = seen(clock, thread / size_, i);
            if (to[i] < time) to[i] = time;
        }
        for (int i = total_; i < 2 * total_; ++i) to[i] = to[i] < clock[i] ? clock[i] : to[i];
        advance(thread);
    }
    UNSEEN void take(uint32_t thread, const Time* from) {
        const Time own = now(thread);
        add(of(thread), from);
        of(thread)[thread] = own;
        ++time_;
    }
    UNSEEN void add(Time* to, const Time* from) const {
        for (int i = 0; i < 2 * total_; ++i) to[i] = to[i] < from[i] ? from[i] : to[i];
    }

  private:
    size_t bytes() const { return 2 * total_ * sizeof(Time); }
    UNSEEN Time seen(const Time* clock, int rank, uint32_t other) const {
        const Time settled = int(other) / size_ == rank ? settled_of_[rank] : settled_;
        return clock[other] < settled ? settled : clock[other];
    }

    const int size_, total_;                           // threads of a block and of the cluster
    Time time_ = 1;                                    // the latest of all
    Time settled_ = 0, settled_of_[kMaxCluster] = {};  // seen by all threads, by all of a block
    bool fences_ = false;
    Time *clocks_, *joint_;  // joint_: of several threads
    Time joined_at_ = 0;
    uint32_t joint_of_ = 0;
};

}  // namespace cpu
