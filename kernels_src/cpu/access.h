// Accesses to memory as the race detector keeps them.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "clocks.h"
#include "site.h"

namespace [[gnu::visibility("hidden")]] cpu {

constexpr Time kInFlight = 1u << 31;  // has begun and not ended: later than every time

enum class Kind : uint8_t { Read, Write, Atomic };
// Who accesses: a thread, cp.async, a bulk copy, wgmma, or a barrier_init that was fenced.
enum class Agent : uint8_t { Thread, Copy, BulkCopy, Product, Barrier };

struct Access {
    Site site;                 // line 0: `file` is the code that a compiler's call returns to
    uint32_t thread, cluster;  // number of the thread in its cluster, of the cluster in the launch
    Time time;
    Kind kind;
    Agent agent;
    uint32_t before;  // in the log: the read or atomic of the same bytes before it
    Time latest;      // of it and all before it

    UNSEEN bool operator==(const Access& other) const {
        return before == other.before && thread == other.thread && time == other.time &&
               is_at(other.site) && cluster == other.cluster && kind == other.kind &&
               agent == other.agent;
    }
    UNSEEN bool is_at(Site other) const {
        return site.file == other.file && site.line == other.line;
    }
};

// Accesses by number, from 1 on; 0 is none. Equal ones share a number where that is easily seen, so
// that bytes with the same history have the same numbers.
class Log {
  public:
    Log() { clear(); }
    ~Log() { free(entries_); }
    Log(const Log&) = delete;

    UNSEEN void clear() {
        count_ = 1;
        memset(recent_, 0, sizeof recent_);
    }
    UNSEEN Access& operator[](uint32_t number) { return entries_[number]; }
    UNSEEN uint32_t end() const { return count_; }

    UNSEEN uint32_t find_or_add(const Access& access) {
        const uint32_t hash = (access.before * 31 + access.thread) * 31 + access.time +
                              uint32_t(reinterpret_cast<uintptr_t>(access.site.file));
        uint32_t& recent = recent_[hash * 0x9E3779B1 >> 20];
        if (recent && entries_[recent] == access) return recent;
        if (count_ == capacity_) {
            capacity_ *= 2;
            entries_ = static_cast<Access*>(realloc(entries_, capacity_ * sizeof(Access)));
        }
        entries_[count_] = access;
        return recent = count_++;
    }

  private:
    uint32_t capacity_ = 1024, count_, recent_[4096];
    Access* entries_ = static_cast<Access*>(calloc(capacity_, sizeof(Access)));
};

}  // namespace cpu
