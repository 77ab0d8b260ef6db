// Copies that complete later: TMA, bulk copies, cp.async.
#include "machine.h"

namespace emulator {

namespace {

constexpr int BOX_BYTES = 128;  // of a box along its innermost dimension: the span of the swizzle

// A tensor map as tensor_maps.py writes it for the emulator, in the 128 bytes of the driver's.
struct TensorMap {
    static constexpr uint64_t MAGIC = 0x74696c65727900ull;
    uint64_t magic, address;
    uint32_t rank, itemsize;
    uint32_t fill;  // the bits of one value, for what is outside
    uint32_t box[4];  // of all dimensions but the innermost
    uint32_t sizes[5];
    uint64_t strides[4];  // bytes
};
static_assert(sizeof(TensorMap) <= 128);

TensorMap read_map(const unsigned char* at) {
    TensorMap map;
    std::memcpy(&map, at, sizeof map);
    if (map.magic != TensorMap::MAGIC) fail(where() + "what should be a tensor map is none");
    return map;
}

// Calls visit(global address or null, offset in the box) for every row of 128 bytes of a box; `inside`: its bytes that are
// inside of the tensor.
template <typename Visit>
void for_each_line(const TensorMap& map, const int (&at)[5], Visit visit) {
    uint32_t lines = 1;
    for (uint32_t d = 1; d < map.rank; ++d) lines *= map.box[d - 1];
    const int64_t columns = BOX_BYTES / map.itemsize;
    const int64_t begin = std::min<int64_t>(std::max<int64_t>(-int64_t{at[0]}, 0), columns);
    const int64_t end = std::max(begin, std::min<int64_t>(int64_t{map.sizes[0]} - at[0], columns));
    for (uint32_t line = 0; line < lines; ++line) {
        int64_t address = static_cast<int64_t>(map.address) + int64_t{at[0]} * map.itemsize;
        bool inside = begin < end;
        uint32_t rest = line;
        for (uint32_t d = 1; d < map.rank; ++d) {
            const int64_t index = int64_t{at[d]} + rest % map.box[d - 1];
            rest /= map.box[d - 1];
            inside = inside && index >= 0 && index < map.sizes[d];
            address += index * static_cast<int64_t>(map.strides[d - 1]);
        }
        visit(reinterpret_cast<unsigned char*>(address), line * BOX_BYTES, inside ? begin * map.itemsize : 0,
              inside ? end * map.itemsize : 0);
    }
}

uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

uint32_t lines_of(const TensorMap& map) {
    uint32_t lines = 1;
    for (uint32_t d = 1; d < map.rank; ++d) lines *= map.box[d - 1];
    return lines;
}

void load_box(const TensorMap& map, const int (&at)[5], unsigned char* window, uint32_t to) {
    for_each_line(map, at, [&](const unsigned char* from, uint32_t offset, int64_t begin, int64_t end) {
        unsigned char line[BOX_BYTES];
        for (uint32_t i = 0; i < BOX_BYTES; i += map.itemsize) std::memcpy(line + i, &map.fill, map.itemsize);
        if (begin < end) std::memcpy(line + begin, from + begin, static_cast<std::size_t>(end - begin));
        for (uint32_t i = 0; i < BOX_BYTES; i += 16) std::memcpy(window + swizzled(to + offset + i), line + i, 16);
    });
}

void require_aligned(const TensorMap& map, const CopyRequest& request) {
    if (int64_t{request.coordinates[0]} * map.itemsize % 16)
        fail(where() + "TMA begins at multiples of 16 bytes, got column " + std::to_string(request.coordinates[0]) + " of values of " +
             std::to_string(map.itemsize) + " (a GPU says: illegal instruction)");
}

}  // namespace

void tma_load(const CopyRequest& request) {
    const TensorMap map = read_map(request.map);
    require_aligned(map, request);
    if (static_cast<int>(map.rank) != request.rank)
        fail(where() + "a tensor map of " + std::to_string(map.rank) + " dimensions in a load of " + std::to_string(request.rank));
    if (request.shared % BOX_BYTES) fail(where() + "TMA loads to multiples of 128 bytes of shared memory");
    const uint32_t bytes = lines_of(map) * BOX_BYTES;
    Cluster& cluster = *current->block->cluster;
    for (std::size_t rank = 0; rank < cluster.blocks.size(); ++rank) {
        Block& block = *cluster.blocks[rank];
        if (request.mask ? !(request.mask >> rank & 1) : &block != current->block) continue;
        const unsigned to_rank = request.mask ? static_cast<unsigned>(rank + 1) << RANK_SHIFT : 0;
        pointer_to(request.shared | to_rank, bytes);
        unsigned char* const barrier = pointer_to(request.barrier | to_rank, 8);
        later(block, [map, request, &block, barrier, bytes] {
            load_box(map, request.coordinates, block.shared, request.shared);
            mbarrier_complete(barrier, bytes);
        });
    }
    if (request.mask >> cluster.blocks.size()) fail(where() + "a multicast to blocks that are not in the cluster");
}

namespace {

BulkGroup& open_group() {
    if (current->bulk_groups.empty()) current->bulk_groups.push_back(std::make_shared<BulkGroup>());
    return *current->bulk_groups.back();
}

}  // namespace

void tma_store(const CopyRequest& request) {
    const TensorMap map = read_map(request.map);
    require_aligned(map, request);
    open_group();
    const std::shared_ptr<BulkGroup> group = current->bulk_groups.back();
    ++group->reads, ++group->writes;
    pointer_to(request.shared, lines_of(map) * BOX_BYTES);
    Block& block = *current->block;
    later(block, [map, request, &block, group] {
        std::vector<unsigned char> box(lines_of(map) * BOX_BYTES);
        for (uint32_t i = 0; i < box.size(); i += 16)
            std::memcpy(&box[i], block.shared + swizzled(request.shared + i), 16);
        --group->reads;
        wake(group.get());
        later([map, request, group, box = std::move(box)] {
            for_each_line(map, request.coordinates, [&](unsigned char* to, uint32_t offset, int64_t begin, int64_t end) {
                if (begin < end) std::memcpy(to + begin, &box[offset + begin], static_cast<std::size_t>(end - begin));
            });
            --group->writes;
            wake(group.get());
        });
    });
}

void bulk_commit() {
    open_group();
    current->bulk_groups.push_back(std::make_shared<BulkGroup>());
}

void bulk_wait(int pending, bool reads_only) {
    const int groups = static_cast<int>(current->bulk_groups.size()) - 1;  // committed
    for (int i = 0; i < groups - pending; ++i) {
        const std::shared_ptr<BulkGroup> group = current->bulk_groups[static_cast<std::size_t>(i)];
        while (group->reads || (!reads_only && group->writes)) wait_on(group.get(), "cp.async.bulk.wait_group");
    }
}

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    if (to % 16 || bytes % 16 || reinterpret_cast<std::uintptr_t>(from) % 16)
        fail(where() + "addresses and size of a bulk copy must be multiples of 16 bytes");
    unsigned char *const target = pointer_to(to, bytes), *const signal = pointer_to(barrier, 8);
    later(*current->block, [=] {
        std::memcpy(target, from, bytes);
        mbarrier_complete(signal, bytes);
    });
}

void bulk_store(unsigned char* to, uint32_t from, uint32_t bytes, bool adds) {
    if (from % 16 || bytes % 16 || reinterpret_cast<std::uintptr_t>(to) % 16)
        fail(where() + "addresses and size of a bulk copy must be multiples of 16 bytes");
    open_group();
    const std::shared_ptr<BulkGroup> group = current->bulk_groups.back();
    ++group->reads, ++group->writes;
    const unsigned char* const source = pointer_to(from, bytes);
    later(*current->block, [=] {
        std::vector<unsigned char> held(source, source + bytes);
        --group->reads;
        wake(group.get());
        later([=, held = std::move(held)] {
            for (uint32_t i = 0; i < bytes; i += 4) {
                float value, before;
                std::memcpy(&value, &held[i], 4), std::memcpy(&before, to + i, 4);
                if (adds) value += before;
                std::memcpy(to + i, &value, 4);
            }
            --group->writes;
            wake(group.get());
        });
    });
}

// cp.async: the copies of a thread complete in order.

namespace {

void in_order(std::function<void()> copy) {
    Thread* const thread = current;
    thread->copies.push_back(std::move(copy));
    ++thread->copies_issued;
    later(*thread->block, [thread] {
        thread->copies.front()();
        thread->copies.pop_front();
        ++thread->copies_done;
        wake(&thread->copies_done);
    });
}

}  // namespace

void copy_async(uint32_t to, const void* from, int bytes, int from_bytes) {
    unsigned char* const target = pointer_to(to, static_cast<std::size_t>(bytes));
    if (to % static_cast<uint32_t>(bytes)) fail(where() + "cp.async to an address that is no multiple of its size");
    in_order([=] {
        if (from_bytes) std::memcpy(target, from, static_cast<std::size_t>(from_bytes));
        std::memset(target + from_bytes, 0, static_cast<std::size_t>(bytes - from_bytes));
    });
}

void copy_arrive(uint32_t barrier) {
    unsigned char* const at = pointer_to(barrier, 8);
    in_order([=] { mbarrier_arrive_at(at); });
}

void copy_commit() { current->copy_groups.push_back(current->copies_issued); }

void copy_wait(int pending) {
    const auto& groups = current->copy_groups;
    if (static_cast<int>(groups.size()) <= pending) return;
    const uint64_t upto = groups[groups.size() - 1 - static_cast<std::size_t>(pending)];
    while (current->copies_done < upto) wait_on(&current->copies_done, "cp.async.wait_group");
}

}  // namespace emulator
