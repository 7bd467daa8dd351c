// Finds data races, compiled in with -DRACES -fsanitize=thread: g++ then calls
// __tsan_read4(address) and the like at each access to memory, and compiler_calls.h answers them in
// place of the library that is usually linked.
//
// Two accesses to the same byte race if one of them writes, different threads make them, and
// neither happens before the other. A thread's own accesses happen one before the other; from one
// thread to another only synchronisation gives an order: what a thread did before a barrier happens
// before what the others do after it. Whether two accesses are ordered does not depend on who in
// fact came first, so one run, in any order, finds the race. How that is decided:
//   - An access keeps its thread and that thread's time (clocks.h). It happened before another if
//     the other's thread has, in its clock, seen that time. Those who meet at a barrier each get
//     the latest of all their clocks. An mbarrier has a clock: who arrives adds to it, who waits
//     gets it.
//   - Of each byte of shared memory the last write is kept, and every read and atomic since. A new
//     write must come after all of them; a read after the write and the atomics.
//   - What runs on by itself (cp.async, bulk copies, wgmma) is in flight, and before nothing, until
//     somebody waits for it; then it counts as done by the thread that waited.
//     The registers of a wgmma are arrays of the thread that nobody may use until then.
//   - wgmma and bulk copies see an ordinary write only past a fence_async_proxy.
//   - Of another block's shared memory it must be known that the block has begun, and to the block
//     that it has been used, or it might end before.
// Shuffles, votes, mma and ldmatrix order nothing in memory, as CUDA's guide says; __syncwarp does.
// Threads of a block may write the same value in the same line: whoever is last, it stays.
//
// In global memory blocks of different clusters have no order at all. Of a byte's reads one a
// cluster, of the last two clusters, is kept: enough to see any conflict between clusters. A kernel
// that calls __threadfence may have an order of its own between them, so that they go unchecked.
#pragma once

#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "race_report.h"

namespace [[gnu::visibility("hidden")]] cpu {

// Of one byte; numbers in a log.
struct Cell {
    uint32_t write, reads, atomics;

    UNSEEN bool operator==(const Cell& other) const {
        return write == other.write && reads == other.reads && atomics == other.atomics;
    }
};

// An access that is being made.
struct Visit {
    Access access;
    int rank;           // of the thread's block
    const Time* clock;  // of the thread
};

// What a copy or a product in flight has in the log of shared memory.
struct Flight {
    uint32_t first, end;
};

// What an mbarrier passes on.
struct Signal {
    std::vector<Time> arrived, ended;       // clocks: of this phase's arrivals, of all that ended
    std::vector<Flight> under_way, landed;  // bulk copies, likewise
};

// Of the blocks of one cluster at a time, all on one OS thread.
class Races {
  public:
    Races(Grid& grid, Block** blocks);
    ~Races();
    Races(const Races&) = delete;
    void begin();  // a cluster begins
    void end();

    // By a thread of the current block.
    UNSEEN Visit by(const Thread& thread, Kind kind, Site site, Agent agent = Agent::Thread) {
        const uint32_t number = number_of(thread);
        const Access access{site, number, cluster_, clocks_.now(number), kind, agent, 0, 0};
        return {access, thread.block->rank, clocks_.of(number)};
    }
    // Started by the current thread, and not over until it lands.
    UNSEEN Visit in_flight(Kind kind, Agent agent, Site site) {
        Visit visit = by(*current_thread, kind, site, agent);
        visit.access.time = kInFlight + ++flights_;
        return visit;
    }
    // The same, started by all lanes of the current warp together; lane 0 stands for them.
    UNSEEN Visit in_flight_of_warp(Kind kind, Agent agent, Site site) {
        Visit visit = in_flight(kind, agent, site);
        visit.access.thread -= current_thread->lane();
        visit.clock = clocks_.of_warp(visit.access.thread);
        return visit;
    }
    UNSEEN uint32_t log_end() const { return shared_log_.end(); }
    // The current thread has waited for it.
    UNSEEN void land(Flight flight) {
        const uint32_t number = number_of(*current_thread);
        for (uint32_t i = flight.first; i < flight.end; ++i) {
            shared_log_[i].thread = number;
            shared_log_[i].time = clocks_.now(number);
        }
    }
    // Lane 0, the first of its warp to go on, has waited on behalf of all.
    UNSEEN void land_for_warp(Flight flight) {
        land(flight);
        clocks_.show_to_warp(number_of(*current_thread));
    }

    // Checks an access to `bytes` bytes, and remembers it.
    void access(const Visit& visit, const void* address, size_t bytes);
    // Called when the current thread's last write has been made, if it was a repeated one.
    void check_repeated();

    // wgmma uses an array of the current thread, which stands for registers.
    void hold(const void* array, size_t bytes, bool may_be_read, Site site);
    void release(const void* array);
    void forget_held();
    void check_held(Kind kind, Site site, const void* address);

    // ---- synchronisation

    UNSEEN void meet(const Block& block, int first_warp, int warps, const uint32_t* lanes) {
        clocks_.meet(block.rank * size_ + first_warp * kLanes, warps, lanes);
    }
    UNSEEN void meet_block(const Block& block) { clocks_.meet_all(block.rank * size_, size_); }
    UNSEEN void meet_cluster() { clocks_.meet_all(0, size_ * grid_.cluster); }
    UNSEEN void fence_async_proxy() { clocks_.fence(number_of(*current_thread)); }
    UNSEEN void fence_threads() { blocks_may_be_ordered_ = true; }

    // mbarriers, by their address
    void init(const void* barrier, Site site);
    void fence_inits();
    void arrive(const void* barrier, Site site);
    void expect(const void* barrier, Flight flight, Site site);  // a bulk copy counts there
    void end_phase(const void* barrier);
    void wait(const void* barrier, Site site);

  private:
    static constexpr uintptr_t kPage = 4096;

    UNSEEN uint32_t number_of(const Thread& thread) const {
        return thread.block->rank * size_ + thread.number;
    }
    const Block& block_of(const Access& access) const { return *blocks_[access.thread / size_]; }
    const Thread& thread_of(const Access& access) const {
        return block_of(access).threads[access.thread % size_];
    }
    UNSEEN const SharedMemory* shared_with(const void* address, int& rank) const {
        for (rank = 0; rank < grid_.cluster; ++rank) {
            if (blocks_[rank]->shared.contains(address)) return &blocks_[rank]->shared;
        }
        return nullptr;
    }
    // Of the OS thread that launched: CUDA's variables, and the kernel's arguments.
    UNSEEN bool belongs_to_os_thread(const char* at) const {
        return size_t(at - os_stack_) < 1 << 16 || size_t(at - os_variables_ + 2048) < 4096;
    }
    Cell* page_of(const void* address);
    Signal& signal(const void* barrier);

    UNSEEN bool ordered(const Access& access, const Visit& visit) const {
        if (access.cluster != cluster_) return blocks_may_be_ordered_;
        return access.time < kInFlight &&
               (access.thread == visit.access.thread ||
                clocks_.has_seen(visit.clock, visit.rank, access.thread, access.time));
    }
    bool allowed(const Access& earlier, const Visit& visit) const;
    bool is_repeated(const Access& earlier, const Visit& visit, const char* at, size_t bytes);
    int name_length() const { return strcspn(grid_.text, "<,"); }
    void visit_other_block(const Visit& visit, int rank);
    void access_cells(const Visit& visit, Cell* cells, const char* at, size_t bytes, bool shared);
    uint32_t with_visit(uint32_t before, Access access, bool shared);
    [[noreturn]] void report(const Access& own, const Access& earlier, const char* at,
                             bool ordered);
    Site line_of(const Access& access);
    void describe(const char* at, char (&text)[160]) const;

    Grid& grid_;
    Block** blocks_;
    const uint32_t size_;  // threads of a block
    const char *os_stack_, *os_variables_;
    Clocks clocks_;
    uint32_t cluster_ = 0, flights_ = 0;
    bool blocks_may_be_ordered_ = false;
    Cell* cells_[kMaxCluster];             // of shared memory
    size_t used_cells_[kMaxCluster] = {};  // this cluster has used none past these
    Log shared_log_, global_log_;
    std::unordered_map<uintptr_t, Cell*> pages_;  // of global memory
    struct {
        uintptr_t page;
        Cell* cells;
    } recent_pages_[64] = {};
    std::unordered_map<const void*, Signal> signals_;
    std::map<std::pair<const char*, int>, Site> lines_;  // of sites
    struct Held {
        const char* end;
        int products;
        bool may_be_read;
        Site site;
    };
    std::map<const char*, Held> held_;              // by their start
    std::vector<uint32_t> unfenced_;                // writes of barrier_init
    std::vector<uint3> indices_;                    // of all blocks until now
    Time begun_at_ = 0;                             // the cluster
    std::vector<Access> last_visits_[kMaxCluster];  // by threads of other blocks
    struct {
        Access own, earlier;
        const char* at;
        char bytes[16];
        size_t count;
    } repeated_ = {};  // the last write, if another thread has written there in the same line
    struct {
        Access own;
        const char* at;
    } unwritten_ = {};  // the first read of what nobody had written
};

}  // namespace cpu

#include "race_search.h"
#include "race_waits.h"
