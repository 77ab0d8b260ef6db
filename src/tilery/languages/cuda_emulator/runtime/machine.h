// The emulated GPU: blocks of threads, how threads wait and are woken, and operations that complete later. One host
// thread runs everything. Which thread runs next, and when an asynchronous operation completes, is drawn at random, so
// that a missing wait shows.
#pragma once
#include <csetjmp>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include <ucontext.h>

#include "kernel.h"

namespace emulator {

using std::uint32_t;
using std::uint64_t;

// Ends the launch with a message; never returns. Called by an emulated thread or by an operation.
[[noreturn]] void fail(const std::string& message);
std::string where();  // "block 3, thread 17: " of the thread that runs

constexpr std::size_t STATIC_SHARED = 16384;  // bytes of a block before its dynamic shared memory
constexpr std::size_t RED_ZONE = 1024;        // bytes behind it that must stay as they are
constexpr unsigned RANK_SHIFT = 20;           // of an address in another block's shared memory: rank + 1
constexpr int NAMED_BARRIERS = 16;

struct Block;
struct Cluster;

// Values that the lanes of a warp exchange: shuffles, votes, and matrix instructions of a warp.
struct Exchange {
    unsigned mask = 0, arrived = 0;
    uint64_t generation = 0;
    uint64_t given[32] = {}, result[32] = {};
    void* operands[32] = {};
};
struct Warp {
    std::deque<Exchange> exchanges;  // one for each mask that was used; addresses stay
};

// A wgmma of 128 threads. It runs after the ones before it, when all threads have issued it.
struct Wgmma {
    uint64_t a_desc = 0, b_desc = 0;
    int n = 0, threads = 0;
    bool accumulate = true, a_in_registers = false, a_mn_major = false, b_mn_major = false;
    char a_type = 'b', b_type = 'b';  // b: bf16, h: fp16, 4: e4m3, 5: e5m2
    float* accumulators[128] = {};
    uint32_t a[128][4] = {};
};
struct Warpgroup {
    std::deque<Wgmma> issued;  // not yet run
    uint64_t done = 0;         // wgmmas that have run
};

// Stores of one thread that were committed together.
struct BulkGroup {
    int reads = 0, writes = 0;  // that are still to come
};

struct Thread : Place {
    Block* block = nullptr;
    Warp* warp = nullptr;
    Warpgroup* warpgroup = nullptr;
    int index = 0, lane = 0;
    bool started = false, ended = false;
    std::jmp_buf registers;
    void* stack = nullptr;
    const void* waits_on = nullptr;
    const char* waits_for = "";
    uint64_t cluster_generation = 0;  // of the cluster barrier that it arrived at
    bool arrived_at_cluster = false;
    uint64_t wgmmas = 0;                 // issued
    std::vector<uint64_t> wgmma_groups;  // wgmmas issued up to each commit
    std::deque<std::function<void()>> copies;  // cp.async, in order
    uint64_t copies_issued = 0, copies_done = 0;
    std::vector<uint64_t> copy_groups;
    std::vector<std::shared_ptr<BulkGroup>> bulk_groups;  // the last is open
};

struct NamedBarrier {
    int arrived = 0, expected = 0;
    uint64_t generation = 0;
};
struct Block {
    Cluster* cluster = nullptr;
    int rank = 0, live = 0;
    int pending = 0;  // asynchronous operations that read or write its shared memory
    unsigned char* shared = nullptr;
    std::vector<std::unique_ptr<Thread>> threads;
    std::vector<Warp> warps;
    std::vector<Warpgroup> warpgroups;
    NamedBarrier barriers[NAMED_BARRIERS];
};
struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    int live = 0, arrived = 0;
    uint64_t generation = 0;
};

extern Thread* current;
extern std::mt19937 randomness;
extern std::size_t shared_size;  // dynamic bytes of each block

// Waiting. `key` is any address; a thread that is woken looks again at what it waits for.
void wait_on(const void* key, const char* what);
void wake(const void* key);
// Lets the others go on before the thread looks again at memory that they may write to. Where nothing has happened for very
// many turns, threads wait for each other.
void poll(const void* key, const char* what);
// Runs an operation at some later time.
void later(std::function<void()> operation);
// The same, of one that uses the shared memory of a block, which must not end before.
void later(Block& block, std::function<void()> operation);

// Shared memory. An address is an offset in the block's own window, or has the rank of another block of the cluster.
Block& block_at(uint32_t address);
unsigned char* pointer_to(uint32_t address, std::size_t bytes);

// Barriers of PTX.
void mbarrier_init(uint32_t address, uint32_t count);
void mbarrier_arrive(uint32_t address, uint32_t expected_bytes = 0);
void mbarrier_complete(unsigned char* barrier, uint32_t bytes);
void mbarrier_arrive_at(unsigned char* barrier);
void mbarrier_wait(uint32_t address, bool parity);
void named_barrier(int id, int threads, bool waits);
void cluster_arrive();
void cluster_wait();

// Runs `together` once for all lanes of the warp; `operands` are those of each lane.
void warp_together(void* operands, const std::function<void(void* const*)>& together);

// Tensor cores and copies.
void wgmma_issue(const Wgmma& mine);
void wgmma_commit();
void wgmma_wait(int pending);
void run_wgmma(Warpgroup& group);
struct CopyRequest {
    const unsigned char* map = nullptr;
    int rank = 2;
    int coordinates[5] = {};
    uint32_t shared = 0, barrier = 0;
    unsigned mask = 0;  // of a multicast; 0: this block alone
};
void tma_load(const CopyRequest& request);
void tma_store(const CopyRequest& request);
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
void bulk_store(unsigned char* to, uint32_t from, uint32_t bytes, bool adds);  // adds: of fp32
void bulk_commit();
void bulk_wait(int pending, bool reads_only);
void copy_async(uint32_t to, const void* from, int bytes, int from_bytes);
void copy_commit();
void copy_wait(int pending);
void copy_arrive(uint32_t barrier);

float to_float(const unsigned char* at, char type);

}  // namespace emulator
