// Models of Hopper's instructions, for hopper.cuh. A wgmma takes effect as late as it may: until it
// is waited for its result is NaN and its operands are unread, so that a missing wait, or a stage
// that is given back too early, changes what a kernel computes. A bulk copy takes effect at once.
#pragma once

#include <string.h>

#include <unordered_map>
#include <vector>

#include "backend.h"
#include "tensor_core.h"

namespace [[gnu::visibility("hidden")]] cpu {

// ---- wgmma

// Of bf16 or fp16.
template <typename T>
UNSEEN Floats values_of(Words bits) {
    return std::is_same_v<T, __half> ? fp16_values(bits) : bf16_values(bits);
}

// An operand in shared memory, from its 64 bits.
struct Operand {
    const char* start;
    uint32_t k_stride, mn_stride;
    Major major;

    UNSEEN Operand(uint64_t bits, Major m)
        : start(current_block->shared.at((bits & 0x3FFF) * 16)),
          k_stride((bits >> 16 & 0x3FFF) * 16),
          mn_stride((bits >> 32 & 0x3FFF) * 16),
          major(m) {}

    // Where the 8 x 8 core matrix of this element is, of 128 bytes.
    UNSEEN const char* core(unsigned mn, unsigned k) const {
        return start + k / 8 * k_stride + mn / 8 * mn_stride;
    }
    // The elements from k = 0 to 15, as bits.
    UNSEEN void row(unsigned mn, uint32_t (&bits)[16]) const {
        const int mn_step = major == Major::K ? 16 : 2, k_step = 18 - mn_step;
        for (int k = 0; k < 16; k += 8) {
            const char* from = core(mn, k) + mn % 8 * mn_step;
            for (int i = 0; i < 8; ++i, from += k_step) {
                uint16_t element;
                memcpy(&element, from, sizeof element);
                bits[k + i] = element;
            }
        }
    }
};

// One wgmma, as one thread sees it: the 2 rows of A behind its results, all of B.
struct Product {
    float* result;
    int count;  // of the thread's results, N / 2
    bool accumulate;
    bool from_registers;
    uint64_t a, b;
    Major major_a, major_b;
    uint32_t rows[2][16];  // the thread's two of A, as bits
    void (*run)(Product&, float* sums);
    IN_RACES(Flight flight;              // lane 0's, for its warp
             const uint32_t* fragment;)  // of A, if it comes from registers
};

// B as floats. 128 threads read the same, one after another: it is converted for the first of them,
// and again for one who finds other bytes there.
struct Converted {
    Major major;
    int columns = 0;
    std::vector<Words> bytes;   // of core matrices, 8 words each
    std::vector<float> values;  // 16 of each column, by pairs of columns

    UNSEEN const float* at(int n, int k) const { return values.data() + n * 16 + k * 2; }

    UNSEEN bool holds(const Operand& b, int count) const {
        if (columns < count || major != b.major) return false;
        Words difference{};
        const Words* kept = bytes.data();
        for (int n = 0; n < count; n += 8) {
            for (int k = 0; k < 16; k += 8) {
                Words core[8];
                memcpy(core, b.core(n, k), sizeof core);
#pragma GCC unroll 8
                for (int i = 0; i < 8; ++i) difference |= core[i] ^ *kept++;
            }
        }
        return (difference[0] | difference[1] | difference[2] | difference[3]) == 0;
    }
    template <typename T>
    UNSEEN void convert(const Operand& b, int count) {
        major = b.major;
        columns = count;
        bytes.resize(count * 2);
        values.resize(count * 16);
        for (int n = 0; n < count; n += 2) {
            uint32_t left[16], right[16];
            b.row(n, left);
            b.row(n + 1, right);
            for (int k = 0; k < 16; k += 2) {
                const Words bits{left[k], right[k], left[k + 1], right[k + 1]};
                const Floats four = values_of<T>(bits);
                memcpy(&values[n * 16 + k * 2], &four, sizeof four);
            }
        }
        for (int n = 0; n < count; n += 8) {
            for (int k = 0; k < 16; k += 8) memcpy(&bytes[n * 2 + k], b.core(n, k), 128);
        }
    }
    template <typename T>
    UNSEEN static const Converted& of(uint64_t operand, Major major, int count) {
        static thread_local std::unordered_map<uint64_t, Converted> all;
        Converted& converted = all[operand];
        const Operand b(operand, major);
        if (!converted.holds(b, count)) converted.convert<T>(b, count);
        return converted;
    }
};

template <typename T>
UNSEEN void run_product(Product& product, float* sums) {
    const unsigned thread = current_thread->number % 128u, quarter = thread % 4;
    const Operand a(product.a, product.major_a);
    const Converted& b = Converted::of<T>(product.b, product.major_b, 2 * product.count);
    Floats left[16];  // both rows, each for 2 columns
    for (int half = 0; half < 2; ++half) {
        uint32_t (&row)[16] = product.rows[half];
        if (!product.from_registers) a.row(thread / 32 * 16 + thread % 32 / 4 + 8 * half, row);
        for (int k = 0; k < 16; k += 4) {
            const Floats four = values_of<T>(Words{row[k], row[k + 1], row[k + 2], row[k + 3]});
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) left[k + i][2 * half] = left[k + i][2 * half + 1] = four[i];
        }
    }
    for (int i = 0; i < product.count; i += 4) {  // 2 columns in both rows, side by side
        Floats sum{};
        if (product.accumulate) memcpy(&sum, sums + i, sizeof sum);
#pragma GCC unroll 16
        for (int k = 0; k < 16; ++k) {
            const float* right = b.at(2 * (i + quarter), k);
            sum += left[k] * Floats{right[0], right[1], right[0], right[1]};
        }
        memcpy(sums + i, &sum, sizeof sum);
    }
}

// What registers will hold when the products have ended that add to it.
struct Sums {
    float* result;
    std::vector<float> values;
};

// What one thread has started: products in order, and how many of them each committed group
// has.
struct Products {
    uint64_t run = 0;  // of the block that they belong to
    std::vector<Product> pending;
    std::vector<int> groups;
    int uncommitted = 0;
    std::vector<Sums> sums;  // the first `used` of them; others keep their memory
    size_t used = 0;

    UNSEEN void begin(uint64_t own_run) {
        run = own_run;
        pending.clear();
        groups.clear();
        uncommitted = used = 0;
    }

    UNSEEN Sums* find(const float* result) {
        for (size_t i = 0; i < used; ++i) {
            if (sums[i].result == result) return &sums[i];
        }
        return nullptr;
    }

    UNSEEN void start(const Product& product, Site site) {
        if (!find(product.result)) {
            if (used == sums.size()) sums.emplace_back();
            Sums& own = sums[used++];
            own.result = product.result;
            own.values.assign(product.result, product.result + product.count);
            std::fill_n(product.result, product.count, NAN);
            IN_RACES(current_block->races->hold(product.result, product.count * sizeof(float),
                                                false, site);)
        }
        IN_RACES(if (product.fragment) current_block->races->hold(
            product.fragment, 4 * sizeof(uint32_t), true, site);)
        static_cast<void>(site);
        pending.push_back(product);
        ++uncommitted;
    }

    UNSEEN void commit() {
        groups.push_back(uncommitted);
        uncommitted = 0;
    }

    UNSEEN void finish_all_but(size_t groups_left) {
        size_t done = 0;
        for (; groups.size() > groups_left; groups.erase(groups.begin())) {
            for (const size_t end = done + groups.front(); done < end; ++done) {
                pending[done].run(pending[done], find(pending[done].result)->values.data());
                IN_RACES(const Flight flight = pending[done].flight;
                         if (flight.end > 0) current_block->races->land_for_warp(flight);
                         current_block->races->release(pending[done].fragment);)
            }
        }
        pending.erase(pending.begin(), pending.begin() + done);
        for (size_t i = 0; i < used;) {
            float* result = sums[i].result;
            bool in_flight = false;
            for (const Product& product : pending) in_flight |= product.result == result;
            if (in_flight) {
                ++i;
            } else {
                std::copy(sums[i].values.begin(), sums[i].values.end(), result);
                IN_RACES(current_block->races->release(result);)
                std::swap(sums[i], sums[--used]);
            }
        }
    }
};

UNSEEN inline Products& products_of_thread() {
    static thread_local std::vector<Products> all;  // by rank in the cluster, then number
    const size_t place = current_block->rank * kMaxThreads + current_thread->number;
    if (place >= all.size()) all.resize(place + 1);
    Products& products = all[place];
    if (products.run != current_block->run) products.begin(current_block->run);
    return products;
}

#ifdef RACES
// A warp's 16 rows of A, and all of B, are read from now on.
UNSEEN inline Flight start_reads(const Product& product, int warp, Site site) {
    Races& races = *current_block->races;
    const Visit visit = races.in_flight_of_warp(Kind::Read, Agent::Product, site);
    const uint32_t first = races.log_end();
    const auto read = [&](const Operand& operand, int mn, int end) UNSEEN {
        for (; mn < end; mn += 8) {
            for (int k = 0; k < 2; ++k) {
                races.access(
                    visit, operand.start + k * operand.k_stride + mn / 8 * operand.mn_stride, 128);
            }
        }
    };
    const int row = warp % 4 * 16;
    if (!product.from_registers) read({product.a, product.major_a}, row, row + 16);
    read({product.b, product.major_b}, 0, 2 * product.count);
    return {first, races.log_end()};
}
#endif

// The lanes of a warp meet, for all must name the same operands; A's fragments are spread over
// quads.
UNSEEN inline void start_product(Product& product, const uint32_t* fragment, Site site) {
    IN_RACES(const Quiet quiet;)
    struct Lane {
        Product* product;
        const uint32_t* fragment;
    } lane{&product, fragment};
    meet(~0u, "wgmma", site, lane, [](const Lanes& lanes) UNSEEN {
        lanes.each([&](int l) UNSEEN {
            const Lane& first = lanes.data<Lane>(0);
            const Lane& self = lanes.data<Lane>(l);
            if (self.product->a != first.product->a || self.product->b != first.product->b ||
                self.product->accumulate != first.product->accumulate) {
                lanes.block.fail(lanes.thread(l), lanes.site,
                                 "wgmma: lanes 0 and %d name different operands", l);
            }
            for (int k = 0; self.fragment && k < 16; ++k) {
                const uint32_t* from = lanes.data<Lane>(l / 4 * 4 + k % 8 / 2).fragment;
                for (int half = 0; half < 2; ++half) {
                    self.product->rows[half][k] = from[k / 8 * 2 + half] >> 16 * (k % 2) & 0xFFFF;
                }
            }
        });
        IN_RACES(Product& of_warp = *lanes.data<Lane>(0).product;
                 of_warp.flight = start_reads(of_warp, lanes.warp, lanes.site);)
    });
    IN_RACES(product.fragment = fragment;)
    products_of_thread().start(product, site);
}

// ---- mbarriers

struct BarrierState {
    uint32_t pending : 15, arrivals : 15, phase : 1,
        unknown : 1;  // unknown: poison, no barrier_init yet
    int32_t bytes;    // announced, not yet arrived

    UNSEEN static BarrierState& of(void* barrier, const char* name, Site site) {
        static_assert(sizeof(BarrierState) == sizeof(uint64_t));
        BarrierState& state = *static_cast<BarrierState*>(barrier);
        if (state.unknown)
            current_block->fail(*current_thread, site, "%s: a barrier without barrier_init", name);
        return state;
    }

    UNSEEN void arrive(const char* name, Site site) {
        IN_RACES(current_block->races->arrive(this, site);)
        if (pending == 0) {
            current_block->fail(*current_thread, site,
                                "%s: more arrivals than the %d of barrier_init", name,
                                int(arrivals));
        }
        --pending;
        advance();
    }

    UNSEEN void add_bytes(int32_t more) {
        bytes += more;
        advance();
    }

  private:
    UNSEEN void advance() {
        if (pending > 0 || bytes != 0) return;
        phase ^= 1;
        pending = arrivals;
        IN_RACES(current_block->races->end_phase(this);)
    }
};

}  // namespace cpu

inline int multiprocessors() { return 4; }  // few, so that small shapes give a block several tiles
template <typename Kernel>
int resident_clusters(Kernel, int blocks, int, size_t) {
    return multiprocessors() / blocks;
}

inline uint64_t wgmma_operand(const void* start, uint32_t k_stride, uint32_t mn_stride,
                              cpu::Site site = cpu::Site::here()) {
    const uint32_t address = shared_address(start);
    if (address % 16 != 0 || k_stride % 16 != 0 || mn_stride % 16 != 0 || k_stride >= 1 << 18 ||
        mn_stride >= 1 << 18 || !cpu::current_block->shared.contains(start)) {
        cpu::current_block->fail(
            *cpu::current_thread, site,
            "wgmma_operand: shared memory at %u with strides %u and %u; each must be a "
            "multiple of 16 below 262144",
            address, k_stride, mn_stride);
    }
    return address >> 4 | uint64_t(k_stride >> 4) << 16 | uint64_t(mn_stride >> 4) << 32;
}

inline uint64_t wgmma_advance(uint64_t operand, int bytes) { return operand + (bytes >> 4); }

inline void wgmma_fence() {}
inline void wgmma_commit() {
    IN_RACES(const cpu::Quiet quiet;)
    cpu::products_of_thread().commit();
}
template <int kPending>
void wgmma_wait() {
    IN_RACES(const cpu::Quiet quiet;)
    cpu::products_of_thread().finish_all_but(kPending);
}
template <int kPending, int kLength>
void wgmma_wait(float (&)[kLength]) {
    wgmma_wait<kPending>();
}

template <typename T, Major kMajorA, Major kMajorB, int kCount>
void wgmma(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate,
           cpu::Site site = cpu::Site::here()) {
    cpu::Product product{
        d, kCount,  accumulate, false, a,
        b, kMajorA, kMajorB,    {},    cpu::run_product<T> IN_RACES(, {}, nullptr)};
    cpu::start_product(product, nullptr, site);
}
template <typename T, Major kMajorB, int kCount>
void wgmma(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool accumulate,
           cpu::Site site = cpu::Site::here()) {
    cpu::Product product{
        d, kCount,   accumulate, true, 0,
        b, Major::K, kMajorB,    {},   cpu::run_product<T> IN_RACES(, {}, nullptr)};
    cpu::start_product(product, a, site);
}

inline void barrier_init(Barrier* barrier, int arrivals, cpu::Site site = cpu::Site::here()) {
    IN_RACES(const cpu::Quiet quiet; cpu::current_block->races->init(barrier, site);)
    cpu::BarrierState state{};
    state.pending = state.arrivals = arrivals;
    memcpy(barrier, &state, sizeof state);
    static_cast<void>(site);
}
inline void barrier_init_fence() {
    IN_RACES(const cpu::Quiet quiet; cpu::current_block->races->fence_inits();)
}
UNSEEN inline void barrier_arrive(Barrier* barrier, cpu::Site site = cpu::Site::here()) {
    IN_RACES(const cpu::Quiet quiet;)
    cpu::BarrierState::of(barrier, "barrier_arrive", site).arrive("barrier_arrive", site);
}
inline void barrier_arrive_expect(Barrier* barrier, uint32_t bytes,
                                  cpu::Site site = cpu::Site::here()) {
    IN_RACES(const cpu::Quiet quiet;)
    cpu::BarrierState& state = cpu::BarrierState::of(barrier, "barrier_arrive_expect", site);
    state.bytes += bytes;
    state.arrive("barrier_arrive_expect", site);
}
UNSEEN inline void barrier_wait(Barrier* barrier, int parity, cpu::Site site = cpu::Site::here()) {
    IN_RACES(const cpu::Quiet quiet;)
    const cpu::BarrierState& state = cpu::BarrierState::of(barrier, "barrier_wait", site);
    cpu::wait_until([&] UNSEEN { return int(state.phase) != parity; }, "barrier_wait", site);
    IN_RACES(cpu::current_block->races->wait(barrier, site);)
}

// ---- bulk copies and clusters

namespace [[gnu::visibility("hidden")]] cpu {

// The cluster's block of this rank.
UNSEEN inline Block& peer(int rank, const char* name, Site site) {
    if (rank >= current_block->grid.cluster) {
        current_block->fail(*current_thread, site, "%s: no block %d in a cluster of %d", name, rank,
                            current_block->grid.cluster);
    }
    return *current_block->cluster[rank];
}

// All threads of all blocks of the cluster meet.
UNSEEN inline void cluster_barrier(const char* name, Site site) {
    IN_RACES(const Quiet quiet;)
    Block& first = *current_block->cluster[0];
    const int phase = first.cluster_phase;
    if (++first.cluster_arrived == first.size * first.grid.cluster) {
        first.cluster_arrived = 0;
        IN_RACES(first.races->meet_cluster();)
        ++first.cluster_phase;
    }
    wait_until([&] UNSEEN { return first.cluster_phase != phase; }, name, site);
}

UNSEEN inline void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                             uint32_t blocks, const char* name, Site site) {
    IN_RACES(const Quiet quiet;)
    Block& block = *current_block;
    if (!block.shared.contains(shared) || reinterpret_cast<uintptr_t>(shared) % 16 != 0 ||
        reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
        block.fail(*current_thread, site,
                   "%s: %u bytes from %p to shared memory at %u; all three must be multiples of 16",
                   name, bytes, global, shared_address(shared));
    }
    for (uint32_t left = blocks; left; left &= left - 1) {
        SharedMemory& memory = peer(lowest_bit(left), name, site).shared;
        char *to = memory.at(shared_address(shared)), *counter = memory.at(shared_address(barrier));
        memcpy(to, global, bytes);
        IN_RACES(Races& races = *block.races; const uint32_t first = races.log_end();
                 races.access(races.in_flight(Kind::Write, Agent::BulkCopy, site), to, bytes);
                 races.expect(counter, {first, first + 1}, site);
                 races.access(races.by(*current_thread, Kind::Read, site), global, bytes);)
        BarrierState::of(counter, name, site).add_bytes(-int32_t(bytes));
    }
}

}  // namespace cpu

inline void copy_bulk(void* shared, const void* global, uint32_t bytes, Barrier* barrier,
                      cpu::Site site = cpu::Site::here()) {
    const uint32_t own = 1u << cpu::current_block->rank;
    cpu::bulk_copy(shared, global, bytes, barrier, own, "copy_bulk", site);
}
inline void copy_bulk_multicast(void* shared, const void* global, uint32_t bytes, Barrier* barrier,
                                uint16_t blocks, cpu::Site site = cpu::Site::here()) {
    cpu::bulk_copy(shared, global, bytes, barrier, blocks, "copy_bulk_multicast", site);
}
inline void fence_async_proxy() {
    IN_RACES(const cpu::Quiet quiet; cpu::current_block->races->fence_async_proxy();)
}
inline void next_kernel_may_start() {}
inline void wait_for_previous_kernel() {}

inline uint32_t cluster_rank() { return cpu::current_block->rank; }
inline void cluster_sync(cpu::Site site = cpu::Site::here()) {
    cpu::cluster_barrier("cluster_sync", site);
}
template <typename T>
T* cluster_pointer(T* shared, uint32_t rank, cpu::Site site = cpu::Site::here()) {
    cpu::Block& peer = cpu::peer(rank, "cluster_pointer", site);
    return reinterpret_cast<T*>(peer.shared.at(shared_address(shared)));
}
UNSEEN inline void barrier_arrive_remote(Barrier* barrier, uint32_t rank,
                                         cpu::Site site = cpu::Site::here()) {
    IN_RACES(const cpu::Quiet quiet;)
    cpu::Block& peer = cpu::peer(rank, "barrier_arrive_remote", site);
    cpu::BarrierState::of(peer.shared.at(shared_address(barrier)), "barrier_arrive_remote", site)
        .arrive("barrier_arrive_remote", site);
}

inline void named_barrier(int index, int threads, cpu::Site site = cpu::Site::here()) {
    cpu::barrier_sync(index, threads, "named_barrier", site);
}
template <int kRegisters>
void registers_decrease() {}
template <int kRegisters>
void registers_increase() {}
