// What lanes of a warp do together. Each lane brings its data, and the last one to come computes
// for all.
#pragma once

#include "scheduler.h"

namespace [[gnu::visibility("hidden")]] cpu {

// The lanes that meet: those of the mask that the block has.
struct Lanes {
    Block& block;
    int warp;
    uint32_t members;
    const char* name;
    Site site;

    UNSEEN bool has(int lane) const { return lane >= 0 && lane < kLanes && (members >> lane & 1); }
    UNSEEN Thread& thread(int lane) const { return block.lane(warp, lane); }
    template <typename Data>
    UNSEEN Data& data(int lane) const {
        return *static_cast<Data*>(thread(lane).data);
    }
    template <typename Action>
    UNSEEN void each(Action action) const {
        for (uint32_t left = members; left; left &= left - 1) action(lowest_bit(left));
    }
};

// The current thread comes to a meeting of the lanes in `mask`; says whether it is the last one.
// All lanes must come to the same function with the same mask. A lane that has returned from the
// kernel may not be in it: on the GPU, whether it still counts depends on time.
UNSEEN inline bool come_to_meeting(const Lanes& lanes, Thread& thread, uint32_t mask, void* data) {
    Block& block = lanes.block;
    Warp& warp = block.warps[lanes.warp];
    if (!lanes.has(thread.lane())) {
        block.fail(thread, lanes.site, "%s: lane %d is not in its own mask 0x%08x", lanes.name,
                   thread.lane(), mask);
    }
    if (const uint32_t gone = lanes.members & warp.exited) {
        block.fail(thread, lanes.site,
                   "%s: mask 0x%08x has lane %d, which returned from the kernel", lanes.name, mask,
                   lowest_bit(gone));
    }
    if (const uint32_t waiting = lanes.members & warp.meeting) {
        const Thread& other = lanes.thread(lowest_bit(waiting));
        if (other.mask != mask || !same_text(other.waits_for, lanes.name)) {
            block.fail(thread, lanes.site,
                       "lane %d comes to %s with mask 0x%08x, but lane %d waits for it at %s with "
                       "mask 0x%08x, %s:%d",
                       thread.lane(), lanes.name, mask, other.lane(), other.waits_for, other.mask,
                       other.site.file, other.site.line);
        }
    }
    thread.mask = mask;
    thread.data = data;
    warp.meeting |= thread.bit();
    return (warp.meeting & lanes.members) == lanes.members;
}

// The lanes of `mask` meet, each with its data; operation(lanes) runs once, and then all go on.
template <typename Data, typename Operation>
UNSEEN void meet(uint32_t mask, const char* name, Site site, Data& data, Operation operation) {
    IN_RACES(const Quiet quiet;)
    Block& block = *current_block;
    Thread& thread = *current_thread;
    Warp& warp = block.warps[thread.warp()];
    const Lanes lanes{block, thread.warp(), mask & warp.existing, name, site};
    if (come_to_meeting(lanes, thread, mask, &data)) {
        operation(lanes);
        warp.meeting &= ~lanes.members;
        block.make_ready(lanes.warp, lanes.members);
    }
    block.wait(thread, name, site);
}

template <typename Value>
struct Exchange {
    Value value;
    int source;  // the lane whose value it becomes
};

template <typename Value>
UNSEEN Value shuffle(uint32_t mask, Value value, int source, const char* name, Site site) {
    Exchange<Value> exchange{value, source};
    meet(mask, name, site, exchange, [](const Lanes& lanes) UNSEEN {
        Value values[kLanes];
        lanes.each([&](int lane)
                       UNSEEN { values[lane] = lanes.data<Exchange<Value>>(lane).value; });
        lanes.each([&](int lane) UNSEEN {
            Exchange<Value>& reader = lanes.data<Exchange<Value>>(lane);
            if (!lanes.has(reader.source)) {
                lanes.block.fail(lanes.thread(lane), lanes.site,
                                 "%s: lane %d reads lane %d, which takes no part", lanes.name, lane,
                                 reader.source);
            }
            reader.value = values[reader.source];
        });
    });
    return exchange.value;
}

// The lanes whose predicate is true.
UNSEEN inline uint32_t ballot(uint32_t mask, bool predicate, const char* name, Site site) {
    uint32_t vote = predicate;
    meet(mask, name, site, vote, [](const Lanes& lanes) UNSEEN {
        uint32_t result = 0;
        lanes.each([&](int lane) UNSEEN { result |= lanes.data<uint32_t>(lane) << lane; });
        lanes.each([&](int lane) UNSEEN { lanes.data<uint32_t>(lane) = result; });
    });
    return vote;
}

// Where in groups of `width` lanes the current lane is.
struct Position {
    int lane, first, last;
    UNSEEN explicit Position(int width)
        : lane(current_thread->lane()), first(lane & -width), last(first + width - 1) {}
};

}  // namespace cpu

// A lane that would read from outside its group of `width` lanes keeps its own value.
template <typename Value>
Value __shfl_sync(uint32_t mask, Value value, int source, int width = 32,
                  cpu::Site site = cpu::Site::here()) {
    const cpu::Position at(width);
    return cpu::shuffle(mask, value, at.first + (source & (width - 1)), "__shfl_sync", site);
}
template <typename Value>
Value __shfl_up_sync(uint32_t mask, Value value, unsigned distance, int width = 32,
                     cpu::Site site = cpu::Site::here()) {
    const cpu::Position at(width);
    const int source = at.lane - int(distance);
    return cpu::shuffle(mask, value, source < at.first ? at.lane : source, "__shfl_up_sync", site);
}
template <typename Value>
Value __shfl_down_sync(uint32_t mask, Value value, unsigned distance, int width = 32,
                       cpu::Site site = cpu::Site::here()) {
    const cpu::Position at(width);
    const int source = at.lane + int(distance);
    return cpu::shuffle(mask, value, source > at.last ? at.lane : source, "__shfl_down_sync", site);
}
template <typename Value>
Value __shfl_xor_sync(uint32_t mask, Value value, int lane_bits, int width = 32,
                      cpu::Site site = cpu::Site::here()) {
    const cpu::Position at(width);
    const int source = at.lane ^ lane_bits;
    return cpu::shuffle(mask, value, source > at.last ? at.lane : source, "__shfl_xor_sync", site);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate, cpu::Site site = cpu::Site::here()) {
    return cpu::ballot(mask, predicate, "__ballot_sync", site);
}
inline int __any_sync(uint32_t mask, int predicate, cpu::Site site = cpu::Site::here()) {
    return cpu::ballot(mask, predicate, "__any_sync", site) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, cpu::Site site = cpu::Site::here()) {
    return cpu::ballot(mask, !predicate, "__all_sync", site) == 0;
}
inline void __syncwarp(uint32_t mask = 0xFFFFFFFF, cpu::Site site = cpu::Site::here()) {
    bool none = false;
    cpu::meet(mask, "__syncwarp", site, none, [](const cpu::Lanes& lanes) {
        IN_RACES(lanes.block.races->meet(lanes.block, lanes.warp, 1, &lanes.members);)
        static_cast<void>(lanes);
    });
}
