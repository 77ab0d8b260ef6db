// Threads, scheduling, shared memory and barriers.
#include "machine.h"

#include <cstdlib>
#include <map>
#include <sys/mman.h>

namespace emulator {

Place* place = nullptr;
Index grid_size, block_size;
Thread* current = nullptr;
std::mt19937 randomness;
std::size_t shared_size = 0;

namespace {

// Steps that an operation takes on average while threads can go on. In every other launch it is LATE, so that whoever
// does not wait for it comes first.
constexpr unsigned SOON = 8, LATE = 4096;

constexpr std::size_t STACK = 512 * 1024;
constexpr int MOST_FRUITLESS = 100000;  // far more than blocks that poll
unsigned patience = SOON;
constexpr unsigned char POISON = 0xff;  // NaN in every floating-point type

struct Launch {
    void (*body)(void**);
    void** args;
};
Launch launch;
std::vector<Thread*> ready, polling;
std::unordered_map<const void*, std::vector<Thread*>> waiting;
std::vector<std::function<void()>> operations;
std::vector<std::unique_ptr<Cluster>> resident;
std::vector<void*> free_stacks;
std::vector<unsigned char*> free_shared;
std::jmp_buf scheduler, failed;
std::string error;
uint64_t steps = 0;
int fruitless = 0;  // turns in a row in which threads polled, and nothing else happened
void* entering = nullptr;

void* take_stack() {
    if (!free_stacks.empty()) {
        void* stack = free_stacks.back();
        free_stacks.pop_back();
        return stack;
    }
    void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for the stack of an emulated thread");
    mprotect(stack, 4096, PROT_NONE);  // a stack that is too small faults
    return stack;
}

unsigned char* take_shared(std::size_t bytes) {
    if (free_shared.empty()) return static_cast<unsigned char*>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
    unsigned char* const taken = free_shared.back();
    free_shared.pop_back();
    return taken;
}

void on_exit_of(Thread& thread);

void enter() {
    Thread* const thread = static_cast<Thread*>(entering);
    launch.body(launch.args);
    on_exit_of(*thread);
    std::longjmp(scheduler, 1);
}

void switch_to(Thread* thread) {
    current = thread, place = thread;
    if (setjmp(scheduler)) {
        current = nullptr, place = nullptr;
        return;
    }
    if (thread->started) std::longjmp(thread->registers, 1);
    thread->started = true;
    thread->stack = take_stack();
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = thread->stack, context.uc_stack.ss_size = STACK, context.uc_link = nullptr;
    makecontext(&context, enter, 0);
    entering = thread;
    setcontext(&context);
}

void start_cluster(int first_block, int cluster_size) {
    fruitless = 0;
    auto cluster = std::make_unique<Cluster>();
    for (int rank = 0; rank < cluster_size; ++rank) {
        auto block = std::make_unique<Block>();
        const int count = static_cast<int>(block_size.x);
        block->cluster = cluster.get(), block->rank = rank, block->live = count;
        block->warps.resize((count + 31) / 32), block->warpgroups.resize((count + 127) / 128);
        const std::size_t bytes = STATIC_SHARED + shared_size + RED_ZONE;
        block->shared = take_shared(bytes);
        std::memset(block->shared, POISON, bytes);
        for (int i = 0; i < count; ++i) {
            auto thread = std::make_unique<Thread>();
            thread->thread = {static_cast<unsigned>(i), 0, 0};
            thread->Place::block = {static_cast<unsigned>(first_block + rank), 0, 0};
            thread->block = block.get(), thread->index = i, thread->lane = i % 32;
            thread->warp = &block->warps[i / 32], thread->warpgroup = &block->warpgroups[i / 128];
            ready.push_back(thread.get());
            block->threads.push_back(std::move(thread));
        }
        cluster->live += count;
        cluster->blocks.push_back(std::move(block));
    }
    resident.push_back(std::move(cluster));
}

void end_block(Block& block) {
    if (block.pending) fail(where() + "the block ended while an asynchronous operation still used its shared memory");
    for (std::size_t i = 0; i < RED_ZONE; ++i)
        if (block.shared[STATIC_SHARED + shared_size + i] != POISON)
            fail(where() + "the block wrote to byte " + std::to_string(shared_size + i) + " of its " +
                 std::to_string(shared_size) + " bytes of dynamic shared memory");
}

void release_if_complete(NamedBarrier& barrier, int expected) {
    if (barrier.arrived == 0 || barrier.arrived < expected) return;
    barrier.arrived = 0, barrier.expected = 0, ++barrier.generation;
    wake(&barrier);
}

void release_cluster_if_complete(Cluster& cluster) {
    if (cluster.arrived == 0 || cluster.arrived < cluster.live) return;
    cluster.arrived = 0, ++cluster.generation;
    wake(&cluster);
}

void on_exit_of(Thread& thread) {
    thread.ended = true;
    Block& block = *thread.block;
    Cluster& cluster = *block.cluster;
    if (thread.wgmmas > thread.warpgroup->done) fail(where() + "the thread ended before its wgmmas were complete");
    --block.live, --cluster.live;
    if (thread.arrived_at_cluster && thread.cluster_generation == cluster.generation) --cluster.arrived;
    if (block.live) release_if_complete(block.barriers[0], block.live);
    if (cluster.live) release_cluster_if_complete(cluster);
    if (!block.live) end_block(block);
    free_stacks.push_back(thread.stack);
}

std::string deadlock() {
    std::string text = "no thread can go on. Waiting:";
    std::map<std::string, int> kinds;  // threads that wait alike
    for (const auto& cluster : resident)
        for (const auto& block : cluster->blocks)
            for (const auto& thread : block->threads) {
                if (thread->ended) continue;
                const auto offset = static_cast<const unsigned char*>(thread->waits_on) - block->shared;
                const bool shared = offset >= 0 && static_cast<std::size_t>(offset) < STATIC_SHARED + shared_size;
                const std::string kind = "\n  block " + std::to_string(thread->Place::block.x) + ", warp " +
                                         std::to_string(thread->index / 32) + " at " + thread->waits_for +
                                         (shared ? " (shared memory + " + std::to_string(offset) + ")" : "");
                ++kinds[kind];
            }
    int shown = 0;
    for (const auto& [kind, count] : kinds)
        if (++shown <= 24) text += kind + ": " + std::to_string(count) + " threads";
    return text;
}

void take_step() {
    const bool operates = ready.empty() ? polling.empty() || randomness() % 2 : randomness() % patience == 0;
    if (!operations.empty() && operates) {
        const std::size_t i = randomness() % operations.size();
        const auto operation = std::move(operations[i]);
        operations[i] = std::move(operations.back());
        operations.pop_back();
        fruitless = 0;
        operation();
        return;
    }
    if (ready.empty() && polling.empty()) fail(deadlock());
    std::vector<Thread*>& from = ready.empty() || (!polling.empty() && randomness() % 8 == 0) ? polling : ready;
    const std::size_t i = randomness() % from.size();
    Thread* const thread = from[i];
    from[i] = from.back();
    from.pop_back();
    ++steps;
    switch_to(thread);
}

void release(const Cluster& cluster) {
    for (const auto& block : cluster.blocks) {
        free_shared.push_back(block->shared);
        for (const auto& thread : block->threads)
            if (thread->started && !thread->ended) free_stacks.push_back(thread->stack);  // after a failure
    }
}

void clear() {
    for (const auto& cluster : resident) release(*cluster);
    resident.clear(), ready.clear(), polling.clear(), waiting.clear(), operations.clear();
}

}  // namespace

void fail(const std::string& message) {
    error = message;
    std::longjmp(failed, 1);
}

std::string where() {
    if (!current) return "";
    return "block " + std::to_string(current->Place::block.x) + ", thread " + std::to_string(current->index) + ": ";
}

uint64_t clock() { return steps; }

void wait_on(const void* key, const char* what) {
    Thread* const thread = current;
    thread->waits_on = key, thread->waits_for = what;
    waiting[key].push_back(thread);
    if (!setjmp(thread->registers)) std::longjmp(scheduler, 1);
}

void poll(const void* key, const char* what) {
    Thread* const thread = current;
    thread->waits_on = key, thread->waits_for = what;
    if (++fruitless > MOST_FRUITLESS) fail(deadlock());
    polling.push_back(thread);
    if (!setjmp(thread->registers)) std::longjmp(scheduler, 1);
}

void wake(const void* key) {
    fruitless = 0;
    const auto found = waiting.find(key);
    if (found == waiting.end()) return;
    ready.insert(ready.end(), found->second.begin(), found->second.end());
    waiting.erase(found);
}

void later(std::function<void()> operation) { operations.push_back(std::move(operation)); }

void later(Block& block, std::function<void()> operation) {
    if (!block.live) fail(where() + "an asynchronous operation on the shared memory of a block that has ended");
    ++block.pending;
    later([&block, operation = std::move(operation)] {
        operation();
        --block.pending;
    });
}

// Shared memory

unsigned shared_address(const void* p) {
    const auto offset = static_cast<const unsigned char*>(p) - current->block->shared;
    if (offset < 0 || static_cast<std::size_t>(offset) > STATIC_SHARED + shared_size)
        fail(where() + "a pointer that is not to this block's shared memory was used as one");
    return static_cast<unsigned>(offset);
}

Block& block_at(uint32_t address) {
    const unsigned rank = address >> RANK_SHIFT;
    if (rank == 0) return *current->block;
    auto& blocks = current->block->cluster->blocks;
    if (rank > blocks.size()) fail(where() + "rank " + std::to_string(rank - 1) + " is not in the cluster");
    return *blocks[rank - 1];
}

unsigned char* pointer_to(uint32_t address, std::size_t bytes) {
    Block& block = block_at(address);
    const std::size_t offset = address & ((1u << RANK_SHIFT) - 1);
    if (offset + bytes > STATIC_SHARED + shared_size)
        fail(where() + std::to_string(bytes) + " bytes at " + std::to_string(offset) + " are outside of the " +
             std::to_string(STATIC_SHARED + shared_size) + " bytes of shared memory (the first " +
             std::to_string(STATIC_SHARED) + " of them static)");
    if (!block.live) fail(where() + "access to the shared memory of a block that has ended");
    return block.shared + offset;
}

void* static_shared(std::size_t& used, std::size_t& offset, std::size_t size, std::size_t alignment) {
    if (offset == NOT_PLACED) {
        offset = (used + alignment - 1) / alignment * alignment, used = offset + size;
        if (used > STATIC_SHARED) fail("more than " + std::to_string(STATIC_SHARED) + " bytes of static shared memory");
    }
    return current->block->shared + offset;
}

void* dynamic_shared() { return current->block->shared + STATIC_SHARED; }

// Barriers

void sync_threads() {
    Block& block = *current->block;
    NamedBarrier& barrier = block.barriers[0];
    ++barrier.arrived;
    const uint64_t generation = barrier.generation;
    release_if_complete(barrier, block.live);
    while (barrier.generation == generation) wait_on(&barrier, "__syncthreads");
}

void named_barrier(int id, int threads, bool waits) {
    if (id < 0 || id >= NAMED_BARRIERS) fail(where() + "named barrier " + std::to_string(id) + " of 16");
    Block& block = *current->block;
    NamedBarrier& barrier = block.barriers[id];
    if (barrier.arrived && barrier.expected != threads)
        fail(where() + "named barrier " + std::to_string(id) + " was begun by others for " +
             std::to_string(barrier.expected) + " threads, here for " + std::to_string(threads));
    barrier.expected = threads, ++barrier.arrived;
    const uint64_t generation = barrier.generation;
    release_if_complete(barrier, threads);
    while (waits && barrier.generation == generation) wait_on(&barrier, "bar.sync");
}

void cluster_arrive() {
    Cluster& cluster = *current->block->cluster;
    current->cluster_generation = cluster.generation, current->arrived_at_cluster = true;
    ++cluster.arrived;
    release_cluster_if_complete(cluster);
}

void cluster_wait() {
    Cluster& cluster = *current->block->cluster;
    if (!current->arrived_at_cluster) fail(where() + "barrier.cluster.wait without an arrive");
    while (cluster.generation == current->cluster_generation) wait_on(&cluster, "barrier.cluster.wait");
    current->arrived_at_cluster = false;
}

namespace {

struct Mbarrier {  // in its eight bytes of shared memory
    uint64_t phase : 1, count : 20, arrivals : 20;
    int64_t bytes : 23;
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier& mbarrier(unsigned char* at) {
    auto& found = *reinterpret_cast<Mbarrier*>(at);
    if (found.count == 0xfffff || found.count == 0) fail(where() + "an mbarrier was used before it was initialised");
    return found;
}

void complete_phase(unsigned char* at) {
    Mbarrier& barrier = mbarrier(at);
    if (barrier.arrivals || barrier.bytes) return;
    barrier.phase ^= 1, barrier.arrivals = barrier.count;
    wake(at);
}

}  // namespace

void mbarrier_init(uint32_t address, uint32_t count) {
    unsigned char* const at = pointer_to(address, 8);
    if (address % 8) fail(where() + "an mbarrier must lie at a multiple of 8 bytes");
    Mbarrier made{};
    made.count = count, made.arrivals = count;
    std::memcpy(at, &made, 8);
}

void mbarrier_arrive_at(unsigned char* at) {
    Mbarrier& barrier = mbarrier(at);
    if (!barrier.arrivals) fail(where() + "more arrivals at an mbarrier than it was initialised for");
    --barrier.arrivals;
    complete_phase(at);
}

void mbarrier_arrive(uint32_t address, uint32_t expected_bytes) {
    unsigned char* const at = pointer_to(address, 8);
    mbarrier(at).bytes += expected_bytes;
    mbarrier_arrive_at(at);
}

void mbarrier_complete(unsigned char* at, uint32_t bytes) {
    mbarrier(at).bytes -= bytes;
    complete_phase(at);
}

void mbarrier_wait(uint32_t address, bool parity) {
    unsigned char* const at = pointer_to(address, 8);
    while (mbarrier(at).phase == parity) wait_on(at, "mbarrier.try_wait");
}

// Lanes of a warp

namespace {

// Gives this lane's part and returns once all lanes of the mask have; the last one runs `together`.
template <typename Together>
Exchange& exchange(unsigned mask, uint64_t bits, void* operands, const char* what, Together together) {
    Warp& warp = *current->warp;
    if (!(mask >> current->lane & 1)) fail(where() + what + " with a mask that lacks this lane");
    Exchange* found = nullptr;
    for (auto& each : warp.exchanges)
        if (each.mask == mask) found = &each;
    if (!found) found = &warp.exchanges.emplace_back(), found->mask = mask;
    found->given[current->lane] = bits, found->operands[current->lane] = operands;
    found->arrived |= 1u << current->lane;
    const uint64_t generation = found->generation;
    if (found->arrived == mask) {
        together(*found);
        found->arrived = 0, ++found->generation;
        wake(found);
    }
    while (found->generation == generation) wait_on(found, what);
    return *found;
}

}  // namespace

uint64_t shuffle(unsigned mask, uint64_t bits, Shuffle how, int argument, int width) {
    // Each lane has its own argument, so it finds its own result among what was given.
    const int lane = current->lane, base = lane / width * width;
    int from = lane;
    if (how == Shuffle::index) from = base + (argument & (width - 1));
    if (how == Shuffle::exclusive_or) from = lane ^ argument;
    if (how == Shuffle::up) from = lane - argument >= base ? lane - argument : lane;
    if (how == Shuffle::down) from = lane + argument < base + width ? lane + argument : lane;
    const Exchange& done = exchange(mask, bits, nullptr, "__shfl_sync", [](Exchange& all) {
        std::memcpy(all.result, all.given, sizeof all.given);
    });
    return done.result[from];
}

unsigned ballot(unsigned mask, bool vote) {
    const Exchange& done = exchange(mask, vote, nullptr, "__ballot_sync", [](Exchange& all) {
        uint64_t votes = 0;
        for (int i = 0; i < 32; ++i) votes |= uint64_t{(all.mask >> i & 1) && all.given[i]} << i;
        for (auto& result : all.result) result = votes;
    });
    return static_cast<unsigned>(done.result[current->lane]);
}

void sync_warp(unsigned mask) {
    exchange(mask, 0, nullptr, "__syncwarp", [](Exchange&) {});
}

void warp_together(void* operands, const std::function<void(void* const*)>& together) {
    exchange(0xffffffff, 0, operands, "an instruction of the whole warp", [&](Exchange& all) { together(all.operands); });
}

}  // namespace emulator

// Runs a kernel. Returns null, or what went wrong. `at_once`: clusters that run side by side.
extern "C" const char* emulator_launch(void (*body)(void**), void** args, int blocks, int threads, long shared, int cluster,
                                       int at_once, unsigned seed) {
    using namespace emulator;
    launch = {body, args};
    grid_size = {static_cast<unsigned>(blocks), 1, 1}, block_size = {static_cast<unsigned>(threads), 1, 1};
    if (shared_size != static_cast<std::size_t>(shared)) {
        for (unsigned char* each : free_shared) std::free(each);
        free_shared.clear();
    }
    shared_size = static_cast<std::size_t>(shared), steps = 0, error.clear();
    randomness.seed(seed);
    patience = randomness() % 2 ? SOON : LATE;
    if (setjmp(failed)) {
        if (error.find("block ") != 0) error = where() + error;
        current = nullptr, place = nullptr;
        clear();
        return error.c_str();
    }
    for (int next = 0;;) {
        while (next < blocks && static_cast<int>(resident.size()) < at_once) start_cluster(next, cluster), next += cluster;
        if (resident.empty()) break;
        take_step();
        for (std::size_t i = 0; i < resident.size(); ++i)
            if (!resident[i]->live) {
                release(*resident[i]);
                resident[i] = std::move(resident.back());
                resident.pop_back(), --i;
            }
    }
    while (!operations.empty()) take_step();  // stores that nobody waits for
    clear();
    return nullptr;
}
