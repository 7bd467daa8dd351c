// In which order a grid's blocks and a block's threads run. A kernel whose result depends on it
// lacks a barrier.
#pragma once

#include <stdint.h>

#include "site.h"

namespace [[gnu::visibility("hidden")]] cpu {

enum class Order { Forward = 0, Reverse = 1, Random = 2 };

struct Schedule {
    Order order = Order::Forward;
    uint64_t seed = 0;
};

inline thread_local Schedule schedule;  // of the launches that this OS thread makes

// xorshift64*: small, and good enough to choose threads.
class Random {
  public:
    explicit Random(uint64_t seed = 0) : state_(seed * 0x9E3779B97F4A7C15 | 1) { below(1); }

    UNSEEN uint32_t below(uint32_t bound) {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        const uint64_t word = (state_ * 0x2545F4914F6CDD1D) >> 32;
        return static_cast<uint32_t>(word * bound >> 32);
    }

  private:
    uint64_t state_;
};

UNSEEN inline int lowest_bit(uint32_t bits) { return __builtin_ctz(bits); }
UNSEEN inline int highest_bit(uint32_t bits) { return 31 - __builtin_clz(bits); }

// Bit i becomes bit i ^ place.
UNSEEN inline uint32_t exchanged(uint32_t bits, uint32_t place) {
    constexpr uint32_t kLower[] = {0x55555555, 0x33333333, 0x0F0F0F0F, 0x00FF00FF, 0x0000FFFF};
#pragma GCC unroll 5
    for (int i = 0; i < 5; ++i) {
        const uint32_t differ = (bits ^ bits >> (1 << i)) & kLower[i] & -(place >> i & 1);
        bits ^= differ | differ << (1 << i);
    }
    return bits;
}

// One of the bits that are set, of which there is at least one. A random one is the i for which
// i ^ place is least, which needs no branch: none could be predicted.
UNSEEN inline int choose_bit(uint32_t bits, Order order, Random& random) {
    if (order == Order::Forward) return lowest_bit(bits);
    if (order == Order::Reverse) return highest_bit(bits);
    const uint32_t place = random.below(32);
    return lowest_bit(exchanged(bits, place)) ^ place;
}

// The n-th of 0 … count - 1 in this order.
class Sequence {
  public:
    Sequence(uint64_t count, Schedule schedule) : count_(count), order_(schedule.order) {
        if (order_ == Order::Random) {
            first_ = schedule.seed % count;
            step_ = count / 2 + 1 + schedule.seed % count;
            while (common_divisor(step_, count) != 1) ++step_;  // then the steps reach everything
        }
    }
    UNSEEN uint64_t at(uint64_t n) const {
        if (order_ == Order::Forward) return n;
        if (order_ == Order::Reverse) return count_ - 1 - n;
        return static_cast<uint64_t>((static_cast<unsigned __int128>(n) * step_ + first_) % count_);
    }

  private:
    static uint64_t common_divisor(uint64_t a, uint64_t b) {
        return b == 0 ? a : common_divisor(b, a % b);
    }
    uint64_t count_, first_ = 0, step_ = 1;
    Order order_;
};

}  // namespace cpu

// The order of this OS thread's launches from now on: 0 forward, 1 reverse, 2 random.
EXPORT void cpu_schedule(int order, uint64_t seed) {
    cpu::schedule = {static_cast<cpu::Order>(order), seed};
}
