// asm statements: parsed once, then interpreted. The instructions are those that the project's kernels use; another one is
// an error that names it.
#include <cctype>
#include <map>

#include "machine.h"

namespace emulator {

namespace {

struct Atom {  // an operand without its brackets and braces: what it means follows from the instruction
    enum Kind { number, operand, name, cluster_rank } kind;
    uint64_t value;  // of a number; else which one
};
struct State {  // of one execution
    Operand* operands;
    std::vector<uint64_t> names;
};
struct Instruction;
using Action = void (*)(const Instruction&, State&);
struct Instruction {
    std::string mnemonic;
    int predicate = -1;  // name that must be true, or false
    bool negated = false;
    std::vector<Atom> atoms;
    Action action = nullptr;

    bool has(const char* modifier) const { return mnemonic.find(modifier) != std::string::npos; }
};

uint64_t get(const Instruction& i, const State& state, std::size_t at) {
    const Atom& atom = i.atoms.at(at);
    if (atom.kind == Atom::number) return atom.value;
    if (atom.kind == Atom::name) return state.names[atom.value];
    if (atom.kind == Atom::cluster_rank) return static_cast<uint64_t>(current->block->rank);
    const Operand& operand = state.operands[atom.value];
    if (!operand.target) return operand.bits;
    uint64_t bits = 0;
    std::memcpy(&bits, operand.target, static_cast<std::size_t>(operand.size));
    return bits;
}
uint32_t get32(const Instruction& i, const State& state, std::size_t at) { return static_cast<uint32_t>(get(i, state, at)); }
float get_float(const Instruction& i, const State& state, std::size_t at) {
    return __uint_as_float(get32(i, state, at));
}
unsigned char* get_pointer(const Instruction& i, const State& state, std::size_t at) {
    return reinterpret_cast<unsigned char*>(get(i, state, at));
}
void set(const Instruction& i, State& state, std::size_t at, uint64_t value) {
    const Atom& atom = i.atoms.at(at);
    if (atom.kind == Atom::name) {
        state.names[atom.value] = value;
    } else {
        const Operand& operand = state.operands[atom.value];
        if (!operand.target) fail(where() + i.mnemonic + " writes to an input");
        std::memcpy(operand.target, &value, static_cast<std::size_t>(operand.size));
    }
}
void set_float(const Instruction& i, State& state, std::size_t at, float value) {
    set(i, state, at, __float_as_uint(value));
}

int number_after(const std::string& text, const char* what) {  // 128 of "m64n128k16" after "m64n"
    return std::atoi(text.c_str() + text.find(what) + std::strlen(what));
}

// What an instruction does

void nothing(const Instruction&, State&) {}
void zero(const Instruction& i, State& s) { set(i, s, 0, 0); }
void move(const Instruction& i, State& s) { set(i, s, 0, get(i, s, 1)); }
void exponential(const Instruction& i, State& s) { set_float(i, s, 0, std::exp2(get_float(i, s, 1))); }

void compare(const Instruction& i, State& s) {  // setp.ne.b32 p, a, b
    bool yes;
    if (i.has(".f32")) {
        const float a = get_float(i, s, 1), b = get_float(i, s, 2);
        yes = i.has(".lt") ? a < b : i.has(".gt") ? a > b : i.has(".ne") ? a != b : a == b;
    } else {
        const auto a = static_cast<int32_t>(get32(i, s, 1)), b = static_cast<int32_t>(get32(i, s, 2));
        yes = i.has(".lt") ? a < b : i.has(".gt") ? a > b : i.has(".ne") ? a != b : a == b;
    }
    set(i, s, 0, yes);
}

void map_address(const Instruction& i, State& s) {
    const uint32_t rank = get32(i, s, 2);
    set(i, s, 0, get32(i, s, 1) | (rank + 1) << RANK_SHIFT);
    block_at(static_cast<uint32_t>(get(i, s, 0)));
}

int vector_of(const Instruction& i) { return i.has(".v4") ? 4 : i.has(".v2") ? 2 : 1; }
std::size_t width_of(const Instruction& i) {
    return i.has("64") ? 8 : i.has(".b16") || i.has(".u16") ? 2 : i.has(".b8") || i.has(".u8") ? 1 : 4;
}

void store(const Instruction& i, State& s) {  // st.shared::cluster.v4.f32 [address], {values}
    const std::size_t count = static_cast<std::size_t>(vector_of(i)), width = width_of(i);
    unsigned char* const to = i.has(".shared") ? pointer_to(get32(i, s, 0), count * width) : get_pointer(i, s, 0);
    if (reinterpret_cast<std::uintptr_t>(to) % (count * width)) fail(where() + i.mnemonic + " to a misaligned address");
    for (std::size_t v = 0; v < count; ++v) {
        const uint64_t value = get(i, s, 1 + v);
        std::memcpy(to + v * width, &value, width);
    }
}
void load(const Instruction& i, State& s) {  // ld.acquire.gpu.global.u32 value, [address]
    const std::size_t count = static_cast<std::size_t>(vector_of(i)), width = width_of(i);
    const unsigned char* const from = i.has(".shared") ? pointer_to(get32(i, s, count), count * width) : get_pointer(i, s, count);
    if (reinterpret_cast<std::uintptr_t>(from) % (count * width)) fail(where() + i.mnemonic + " from a misaligned address");
    if (i.has(".acquire")) poll(from, "ld.acquire");
    for (std::size_t v = 0; v < count; ++v) {
        uint64_t value = 0;
        std::memcpy(&value, from + v * width, width);
        set(i, s, v, value);
    }
}
void atomic_add(const Instruction& i, State& s) {  // atom.add… old, [address], value; red.add… [address], value
    const std::size_t first = i.mnemonic.rfind("atom", 0) == 0 ? 1 : 0, width = width_of(i);
    unsigned char* const at = i.has(".shared") ? pointer_to(get32(i, s, first), width) : get_pointer(i, s, first);
    uint64_t old = 0;
    std::memcpy(&old, at, width);
    const uint64_t sum = i.has(".f32") ? __float_as_uint(__uint_as_float(static_cast<uint32_t>(old)) + get_float(i, s, first + 1))
                                       : old + get(i, s, first + 1);
    std::memcpy(at, &sum, width);
    if (first) set(i, s, 0, old);
}
void store_async(const Instruction& i, State& s) {  // [address], {values}, [mbarrier]
    const std::size_t count = static_cast<std::size_t>(vector_of(i));
    unsigned char* const to = pointer_to(get32(i, s, 0), 4 * count);
    unsigned char* const barrier = pointer_to(get32(i, s, 1 + count), 8);
    std::vector<uint32_t> values;
    for (std::size_t v = 0; v < count; ++v) values.push_back(get32(i, s, 1 + v));
    later(block_at(get32(i, s, 0)), [=] {
        std::memcpy(to, values.data(), 4 * count);
        mbarrier_complete(barrier, static_cast<uint32_t>(4 * count));
    });
}

void barrier_init(const Instruction& i, State& s) { mbarrier_init(get32(i, s, 0), get32(i, s, 1)); }
void barrier_arrive(const Instruction& i, State& s) { mbarrier_arrive(get32(i, s, 1)); }
void barrier_expect(const Instruction& i, State& s) { mbarrier_arrive(get32(i, s, 1), get32(i, s, 2)); }
void barrier_wait(const Instruction& i, State& s) {  // the loop around it finds it done at once
    mbarrier_wait(get32(i, s, 1), get32(i, s, 2) & 1);
    set(i, s, 0, 1);
}
void bar_sync(const Instruction& i, State& s) {
    const bool counted = i.atoms.size() > 1;
    if (counted) named_barrier(static_cast<int>(get32(i, s, 0)), static_cast<int>(get32(i, s, 1)), true);
    else if (get32(i, s, 0) == 0) sync_threads();
    else fail(where() + i.mnemonic + " needs a number of threads");
}
void bar_arrive(const Instruction& i, State& s) {
    named_barrier(static_cast<int>(get32(i, s, 0)), static_cast<int>(get32(i, s, 1)), false);
}
void arrive_at_cluster(const Instruction&, State&) { cluster_arrive(); }
void wait_for_cluster(const Instruction&, State&) { cluster_wait(); }

void tensor_copy(const Instruction& i, State& s) {
    CopyRequest request;
    request.rank = i.mnemonic[std::strlen("cp.async.bulk.tensor.")] - '0';
    const auto rank = static_cast<std::size_t>(request.rank);
    const bool is_store = i.has(".global.shared::cta");
    const std::size_t first = is_store ? 1 : 2;  // [map, {…}], [shared] or [shared], [map, {…}], [mbarrier]
    request.map = get_pointer(i, s, first - 1);
    for (std::size_t d = 0; d < rank; ++d) request.coordinates[d] = static_cast<int>(get32(i, s, first + d));
    if (is_store) {
        request.shared = get32(i, s, first + rank);
        tma_store(request);
        return;
    }
    request.shared = get32(i, s, 0), request.barrier = get32(i, s, first + rank);
    if (i.has(".multicast::cluster")) request.mask = get32(i, s, first + rank + 1) & 0xffff;
    tma_load(request);
}
void bulk_copy(const Instruction& i, State& s) {
    bulk_load(get32(i, s, 0), get_pointer(i, s, 1), get32(i, s, 2), get32(i, s, 3));
}
void bulk_copy_out(const Instruction& i, State& s) {  // [address], [shared], bytes
    if (i.has(".reduce") && !i.has(".add.f32")) fail(where() + i.mnemonic + " is not emulated");
    bulk_store(get_pointer(i, s, 0), get32(i, s, 1), get32(i, s, 2), i.has(".reduce"));
}
void commit_bulk(const Instruction&, State&) { bulk_commit(); }
void wait_bulk(const Instruction& i, State& s) { bulk_wait(static_cast<int>(get32(i, s, 0)), i.has(".read")); }
void async_copy(const Instruction& i, State& s) {  // [to], [from], bytes [, bytes to read] [, L2 policy]
    const int bytes = static_cast<int>(get32(i, s, 2));
    const bool reads_fewer = i.atoms.size() > (i.has(".L2::cache_hint") ? 4u : 3u);
    copy_async(get32(i, s, 0), get_pointer(i, s, 1), bytes, reads_fewer ? static_cast<int>(get32(i, s, 3)) : bytes);
}
void arrive_after_copies(const Instruction& i, State& s) { copy_arrive(get32(i, s, 0)); }
void commit_copies(const Instruction&, State&) { copy_commit(); }
void wait_copies(const Instruction& i, State& s) { copy_wait(static_cast<int>(get32(i, s, 0))); }

char type_named(const std::string& text) {
    return text == "bf16" ? 'b' : text == "f16" ? 'h' : text == "e4m3" ? '4' : '5';
}
void warpgroup_mma(const Instruction& i, State& s) {  // wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16
    Wgmma mine;
    mine.n = number_after(i.mnemonic, "m64n");
    const std::size_t types = i.mnemonic.find(".f32.") + 5, second = i.mnemonic.find('.', types);
    mine.a_type = type_named(i.mnemonic.substr(types, second - types)), mine.b_type = type_named(i.mnemonic.substr(second + 1));
    const auto count = static_cast<std::size_t>(mine.n / 2);
    for (std::size_t r = 0; r < count; ++r) {
        auto* const at = static_cast<float*>(s.operands[i.atoms[r].value].target);
        if (r == 0) mine.accumulators[current->index % 128] = at;
        if (at != mine.accumulators[current->index % 128] + r) fail(where() + "accumulators of a wgmma must lie side by side");
    }
    std::size_t next = count;
    const bool wide = mine.a_type == 'b' || mine.a_type == 'h';
    // After the accumulators: a and b, the predicate, signs of a and b, and of 16-bit types whether they are MN-major.
    mine.a_in_registers = i.atoms.size() == count + 5 + 3 + 1;
    if (mine.a_in_registers)
        for (std::size_t r = 0; r < 4; ++r) mine.a[current->index % 128][r] = get32(i, s, next++);
    else
        mine.a_desc = get(i, s, next++);
    mine.b_desc = get(i, s, next++);
    mine.accumulate = get(i, s, next) != 0, next += 3;
    if (mine.a_in_registers) mine.b_mn_major = get(i, s, next) != 0;
    else if (wide) mine.a_mn_major = get(i, s, next) != 0, mine.b_mn_major = get(i, s, next + 1) != 0;
    wgmma_issue(mine);
}
void commit_wgmma(const Instruction&, State&) { wgmma_commit(); }
void wait_wgmma(const Instruction& i, State& s) { wgmma_wait(static_cast<int>(get32(i, s, 0))); }

struct Lane {
    const Instruction* instruction;
    State* state;
    uint32_t get(std::size_t at) const { return get32(*instruction, *state, at); }
};

void mma(const Instruction& i, State& s) {  // mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 d, a, b, c
    if (!i.has("m16n8k16")) fail(where() + i.mnemonic + " is not emulated");
    const char type = i.has(".bf16.") ? 'b' : 'h';
    Lane mine{&i, &s};
    warp_together(&mine, [type](void* const* lanes) {
        const auto element = [&](int lane, std::size_t atom, int half) {
            const uint32_t word = static_cast<Lane*>(lanes[lane])->get(atom);
            const auto bits = static_cast<uint16_t>(word >> 16 * half);
            return to_float(reinterpret_cast<const unsigned char*>(&bits), type);
        };
        float result[32][4];
        for (int lane = 0; lane < 32; ++lane)
            for (int r = 0; r < 4; ++r) {
                const int row = lane / 4 + r / 2 * 8, col = lane % 4 * 2 + r % 2;
                float sum = 0.0f;
                for (int k = 0; k < 16; ++k)
                    sum += element(row % 8 * 4 + k % 8 / 2, 4 + static_cast<std::size_t>(k / 8 * 2 + row / 8), k % 2) *
                           element(col * 4 + k % 8 / 2, 8 + static_cast<std::size_t>(k / 8), k % 2);
                result[lane][r] = __uint_as_float(static_cast<Lane*>(lanes[lane])->get(10 + static_cast<std::size_t>(r))) + sum;
            }
        for (int lane = 0; lane < 32; ++lane)
            for (std::size_t r = 0; r < 4; ++r) {
                const Lane& to = *static_cast<Lane*>(lanes[lane]);
                set_float(*to.instruction, *to.state, r, result[lane][r]);
            }
    });
}

// Rows of 8 × 8 matrices of 16-bit values, a row from the address of each lane.
void load_matrices(const Instruction& i, State& s) {  // ldmatrix.sync.aligned.m8n8.x4[.trans].shared.b16 {…}, [address]
    const int count = i.has(".x4") ? 4 : i.has(".x2") ? 2 : 1;
    const bool transposed = i.has(".trans");
    Lane mine{&i, &s};
    warp_together(&mine, [count, transposed](void* const* lanes) {
        for (int m = 0; m < count; ++m) {
            uint16_t matrix[8][8];
            for (int row = 0; row < 8; ++row) {
                const uint32_t address = static_cast<Lane*>(lanes[m * 8 + row])->get(static_cast<std::size_t>(count));
                if (address % 16) fail(where() + "ldmatrix from an address that is no multiple of 16");
                std::memcpy(matrix[row], pointer_to(address, 16), 16);
            }
            for (int lane = 0; lane < 32; ++lane) {
                const int row = lane / 4, col = lane % 4 * 2;
                const uint16_t low = transposed ? matrix[col][row] : matrix[row][col];
                const uint16_t high = transposed ? matrix[col + 1][row] : matrix[row][col + 1];
                const Lane& to = *static_cast<Lane*>(lanes[lane]);
                set(*to.instruction, *to.state, static_cast<std::size_t>(m), low | uint32_t{high} << 16);
            }
        }
    });
}
void store_matrices(const Instruction& i, State& s) {  // stmatrix.sync.aligned.m8n8.x4[.trans].shared.b16 [address], {…}
    const int count = i.has(".x4") ? 4 : i.has(".x2") ? 2 : 1;
    const bool transposed = i.has(".trans");
    Lane mine{&i, &s};
    warp_together(&mine, [count, transposed](void* const* lanes) {
        for (int m = 0; m < count; ++m) {
            uint16_t matrix[8][8];
            for (int lane = 0; lane < 32; ++lane) {
                const int row = lane / 4, col = lane % 4 * 2;
                const uint32_t word = static_cast<Lane*>(lanes[lane])->get(1 + static_cast<std::size_t>(m));
                (transposed ? matrix[col][row] : matrix[row][col]) = static_cast<uint16_t>(word);
                (transposed ? matrix[col + 1][row] : matrix[row][col + 1]) = static_cast<uint16_t>(word >> 16);
            }
            for (int row = 0; row < 8; ++row) {
                const uint32_t address = static_cast<Lane*>(lanes[m * 8 + row])->get(0);
                if (address % 16) fail(where() + "stmatrix to an address that is no multiple of 16");
                std::memcpy(pointer_to(address, 16), matrix[row], 16);
            }
        }
    });
}
void transpose_matrix(const Instruction& i, State& s) {  // movmatrix.sync.aligned.m8n8.trans.b16 d, a
    Lane mine{&i, &s};
    warp_together(&mine, [](void* const* lanes) {
        uint16_t matrix[8][8];
        for (int lane = 0; lane < 32; ++lane) {
            const uint32_t word = static_cast<Lane*>(lanes[lane])->get(1);
            matrix[lane / 4][lane % 4 * 2] = static_cast<uint16_t>(word);
            matrix[lane / 4][lane % 4 * 2 + 1] = static_cast<uint16_t>(word >> 16);
        }
        for (int lane = 0; lane < 32; ++lane) {
            const Lane& to = *static_cast<Lane*>(lanes[lane]);
            const uint32_t low = matrix[lane % 4 * 2][lane / 4], high = matrix[lane % 4 * 2 + 1][lane / 4];
            set(*to.instruction, *to.state, 0, low | high << 16);
        }
    });
}

// The first that a mnemonic begins with.
const std::pair<const char*, Action> ACTIONS[] = {
    {"griddepcontrol.", nothing}, {"fence.", nothing}, {"membar.", nothing}, {"setmaxnreg.", nothing},
    {"prefetch", nothing}, {".reg", nothing}, {"bra", nothing}, {"wgmma.fence", nothing}, {"createpolicy.", zero},
    {"mov.", move}, {"ex2.", exponential}, {"setp.", compare}, {"mapa.", map_address},
    {"st.async", store_async}, {"st.", store}, {"ld.", load}, {"atom.", atomic_add}, {"red.async", nullptr}, {"red.", atomic_add},
    {"mbarrier.init", barrier_init}, {"mbarrier.arrive.expect_tx", barrier_expect}, {"mbarrier.arrive", barrier_arrive},
    {"mbarrier.try_wait", barrier_wait}, {"bar.sync", bar_sync}, {"bar.arrive", bar_arrive},
    {"barrier.cluster.arrive", arrive_at_cluster}, {"barrier.cluster.wait", wait_for_cluster},
    {"cp.async.bulk.tensor.", tensor_copy}, {"cp.async.bulk.commit_group", commit_bulk},
    {"cp.async.bulk.wait_group", wait_bulk}, {"cp.async.bulk.shared", bulk_copy},
    {"cp.async.bulk.global", bulk_copy_out}, {"cp.reduce.async.bulk.global", bulk_copy_out},
    {"cp.async.mbarrier.arrive", arrive_after_copies}, {"cp.async.commit_group", commit_copies},
    {"cp.async.wait_group", wait_copies}, {"cp.async.c", async_copy},
    {"wgmma.mma_async", warpgroup_mma}, {"wgmma.commit_group", commit_wgmma}, {"wgmma.wait_group", wait_wgmma},
    {"mma.sync", mma}, {"ldmatrix", load_matrices}, {"stmatrix", store_matrices}, {"movmatrix", transpose_matrix},
};

Action action_of(const std::string& mnemonic) {
    for (const auto& [prefix, action] : ACTIONS)
        if (mnemonic.rfind(prefix, 0) == 0 && action) return action;
    fail("the PTX instruction " + mnemonic + " is not emulated");
}

}  // namespace

class Program {
  public:
    explicit Program(const char* ptx) {
        std::string statement;
        for (const char* at = ptx;; ++at) {
            if (*at && *at != ';') {
                statement += *at;
                continue;
            }
            add(statement);
            statement.clear();
            if (!*at) break;
        }
    }
    void run(Operand* operands) const {
        State state{operands, std::vector<uint64_t>(names_.size())};
        for (const Instruction& i : instructions_)
            if (i.predicate < 0 || (state.names[static_cast<std::size_t>(i.predicate)] != 0) != i.negated) i.action(i, state);
    }

  private:
    std::vector<Instruction> instructions_;
    std::map<std::string, std::size_t> names_;

    std::size_t name(const std::string& text) { return names_.try_emplace(text, names_.size()).first->second; }

    void add(std::string text) {
        const auto skip = [&text](const char* what) {
            const std::size_t from = text.find_first_not_of(what);
            text = from == std::string::npos ? "" : text.substr(from);
        };
        skip(" \n\t{}");
        const std::size_t colon = text.find(':');
        if (colon != std::string::npos && colon + 1 < text.size() && text[colon + 1] != ':' &&
            text.find_first_of(" .%") > colon)
            text = text.substr(colon + 1);  // a label
        skip(" \n\t");
        if (text.empty()) return;
        Instruction made;
        if (text[0] == '@') {
            made.negated = text[1] == '!';
            const std::size_t begin = made.negated ? 2 : 1, end = text.find(' ');
            made.predicate = static_cast<int>(name(text.substr(begin, end - begin)));
            text = text.substr(end + 1);
        }
        const std::size_t end = text.find_first_of(" \n\t");
        made.mnemonic = text.substr(0, end);
        made.action = action_of(made.mnemonic);
        if (made.mnemonic != ".reg" && made.mnemonic != "bra" && end != std::string::npos) read_atoms(text.substr(end), made);
        instructions_.push_back(std::move(made));
    }
    void read_atoms(const std::string& text, Instruction& to) {
        std::size_t at = 0;
        while ((at = text.find_first_not_of(" \n\t,[]{}", at)) != std::string::npos) {
            const std::size_t end = std::min(text.find_first_of(" \n\t,[]{}", at), text.size());
            const std::string atom = text.substr(at, end - at);
            at = end;
            if (atom == "%%cluster_ctarank") to.atoms.push_back({Atom::cluster_rank, 0});
            else if (atom[0] == '%') to.atoms.push_back({Atom::operand, std::strtoull(atom.c_str() + 1, nullptr, 10)});
            else if (atom.rfind("0f", 0) == 0) to.atoms.push_back({Atom::number, std::strtoull(atom.c_str() + 2, nullptr, 16)});
            else if (std::isdigit(static_cast<unsigned char>(atom[0]))) to.atoms.push_back({Atom::number, std::strtoull(atom.c_str(), nullptr, 0)});
            else to.atoms.push_back({Atom::name, name(atom)});
        }
    }
};

const Program* parse(const char* ptx) { return new Program(ptx); }  // kept as long as the kernel is
void execute(const Program* program, Operand* operands) { program->run(operands); }

}  // namespace emulator
