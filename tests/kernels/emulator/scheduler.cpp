// Fibers, the order in which they run, and the points where they meet.
#include <sys/mman.h>

#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "state.h"

extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size);
__attribute__((weak)) void __sanitizer_print_stack_trace();
void emu_swap(void** save, void* load);
}
// Switches stacks: the callee-saved registers of the System V x86-64 calling convention, then rsp.
asm(R"(
.text
.globl emu_swap
.type emu_swap, @function
emu_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_swap, .-emu_swap
)");

namespace emu {

Thread* self;
Options options;

namespace {

constexpr size_t STACK = 256 * 1024, MAX_STACKS = 16384;
constexpr unsigned HOPELESS = 100000;  // rounds of polling in which nothing else happened

struct {
  Fiber host;  // the context of run_grid
  Fiber* from = nullptr;
  const void* host_stack = nullptr;
  size_t host_stack_bytes = 0;
  const std::function<void()>* kernel = nullptr;
  std::vector<Warp*> warps;  // of all live blocks
  unsigned last = 0;         // the warp that round robin chose last
  uint64_t random = 1;
  unsigned idle_rounds = 0;
  bool pdl_waited = false;
  char* stack_region = nullptr;
  size_t stacks_used = 0;
  std::vector<char*> free_stacks, free_arenas;
} state;

uint32_t random32() {
  state.random ^= state.random << 13;
  state.random ^= state.random >> 7;
  state.random ^= state.random << 17;
  return uint32_t(state.random >> 32);
}

// ---------------------------------------------------------------- switching
void switch_to(Fiber& from, Fiber& to, bool dying = false) {
  void* fake = nullptr;
  const bool to_host = &to == &state.host;
  state.from = &from;
  if (__sanitizer_start_switch_fiber) {
    const void* stack = to_host ? state.host_stack : to.stack;
    __sanitizer_start_switch_fiber(dying ? nullptr : &fake, stack, to_host ? state.host_stack_bytes : STACK);
  }
  self = to_host ? nullptr : &to;
  emu_swap(&from.stack_pointer, to.stack_pointer);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}

[[noreturn]] void deadlock() {
  std::fprintf(stderr, "emu: deadlock (seed %u); waiting threads:\n", options.seed);
  for (Warp* w : state.warps) {
    std::map<std::string, uint32_t> lanes;
    for (int i = 0; i < 32; ++i)
      if ((w->exists & ~w->exited) >> i & 1) lanes[w->lane[i]->waits_for] |= 1u << i;
    const dim3 b = w->block->index;
    for (auto& [what, mask] : lanes)
      std::fprintf(stderr, "  block (%u,%u,%u) warp %u lanes %08x: %s\n", b.x, b.y, b.z, w->id, mask, what.c_str());
  }
  std::fflush(nullptr);
  std::_Exit(3);
}

// Performs one pending bulk copy of any block; false when there is none.
bool run_copy_engine(bool oldest) {
  std::vector<Block*> busy;
  for (Warp* w : state.warps)
    if (w->id == 0 && !w->block->bulk_copies.empty()) busy.push_back(w->block);
  if (busy.empty()) return false;
  Block& b = *busy[oldest ? 0 : random32() % busy.size()];
  const auto chosen = b.bulk_copies.begin() + (oldest ? 0 : random32() % b.bulk_copies.size());
  const BulkCopy copy = std::move(*chosen);
  b.bulk_copies.erase(chosen);
  finish_bulk_copy(b, copy);
  return true;
}

Warp* choose_ready_warp() {
  const unsigned n = unsigned(state.warps.size());
  Warp* best = nullptr;
  if (options.seed == 0) {
    for (unsigned i = 1; i <= n; ++i) {
      const unsigned next = (state.last + i) % n;
      if (!state.warps[next]->ready) continue;
      state.last = next;
      return state.warps[next];
    }
  } else if (options.seed % 2) {
    for (Warp* w : state.warps)
      if (w->ready && (!best || w->priority > best->priority)) best = w;
  } else {
    unsigned candidates = 0;
    for (Warp* w : state.warps)
      if (w->ready && random32() % ++candidates == 0) best = w;
  }
  return best;
}

Warp& choose_warp() {
  for (;;) {
    if (options.seed == 0) run_copy_engine(true);
    else if (options.seed % 2 == 0 && random32() % 4 == 0) run_copy_engine(false);
    if (Warp* w = choose_ready_warp()) return *w;
    if (run_copy_engine(false)) continue;
    bool any = false;
    for (Warp* w : state.warps) {
      any |= w->spinning != 0;
      w->ready |= w->spinning;
      w->spinning = 0;
    }
    if (!any || ++state.idle_rounds > HOPELESS) deadlock();
  }
}

Fiber& choose_lane(Warp& w) {
  const uint32_t rotated = std::rotr(w.ready, int(w.rotate));
  const unsigned i = w.reverse ? 31 - std::countl_zero(rotated) : std::countr_zero(rotated);
  return *w.lane[(i + w.rotate) & 31];
}

// Gives the processor away; the caller has already cleared its ready bit if it waits.
void reschedule(bool leave_warp) {
  Warp& w = this_warp();
  Fiber& to = choose_lane(leave_warp || !w.ready ? choose_warp() : w);
  if (&to != &this_fiber()) switch_to(this_fiber(), to);
}

void release_barrier(Block& b, Barrier& bar) {
  for (auto& w : b.warps) {
    if (!(bar.warps >> w->id & 1)) continue;
    w->time.join(bar.time);
    ++w->time.t[w->id];
    ++w->epoch;
    w->ready |= bar.waiting[w->id];
  }
  bar = Barrier();
}

// The threads of a cluster that have not ended meet.
void release_cluster_if_due(Cluster& c) {
  unsigned live = 0;
  for (Block* b : c.blocks) live += b ? b->live : 0;
  if (c.arrived == 0 || c.arrived != live) return;
  BlockClock seen;
  uint32_t earlier_grids = 0;
  for (Block* b : c.blocks) {
    if (!b) continue;
    b->seen[b->linear] = b->clock++;
    join(seen, b->seen);
    earlier_grids = std::max(earlier_grids, b->cluster_barrier.time.t[EARLIER_GRIDS]);
  }
  for (Block* b : c.blocks) {
    if (!b) continue;
    b->seen = seen;
    b->cluster_barrier.time.t[EARLIER_GRIDS] = earlier_grids;
    b->synced = b->cluster_barrier.time;
    release_barrier(*b, b->cluster_barrier);
  }
  c.arrived = 0;
  ++c.phase;
}

// ---------------------------------------------------------------- the life of a thread and of a block
[[noreturn]] void end_thread() {
  Fiber& f = this_fiber();
  Block& b = this_block();
  Warp& w = this_warp();
  for (auto& g : f.cp_async_groups)
    if (!g.empty()) fail("the thread ends with a cp.async group never waited for");
  if (!f.cp_async_open.empty()) fail("the thread ends with a cp.async never committed");
  if (!f.stores_open.empty()) fail("the thread ends with a tensor store never committed");
  if (!f.store_groups.empty()) fail("the thread ends with a tensor store never waited for");
  if (!w.wgmma_open.empty() || !w.wgmma_groups.empty()) fail("the thread ends with wgmma never waited for");
  w.exited |= 1u << f.lane;
  w.ready &= ~(1u << f.lane);
  --b.live;
  progress();
  release_cluster_if_due(*b.cluster);
  if (b.live == 0) {
    if (b.last_cluster_read == b.cluster->phase)
      fail("the block ends after another block's read of its shared memory, no cluster_sync between");
    if (!b.bulk_copies.empty()) fail("the block ends with a bulk copy in flight");
    switch_to(f, state.host, true);
  }
  Barrier& all = b.barriers[0];  // __syncthreads does not wait for threads that have ended
  if (all.arrived && all.expected == 0 && all.arrived == b.live) release_barrier(b, all);
  switch_to(f, choose_lane(w.ready ? w : choose_warp()), true);
  std::abort();
}

void run_thread() {
  if (__sanitizer_finish_switch_fiber) {
    const void* stack;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
    if (state.from == &state.host) {
      state.host_stack = stack;
      state.host_stack_bytes = bytes;
    }
  }
  (*state.kernel)();
  end_thread();
}

char* map_memory(size_t n) {
  void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("out of memory");
  return static_cast<char*>(p);
}

void give_stack(Fiber& f) {
  if (!state.stack_region) state.stack_region = map_memory(STACK * MAX_STACKS);
  if (state.free_stacks.empty()) {
    if (state.stacks_used == MAX_STACKS) fail("too many threads in flight");
    state.free_stacks.push_back(state.stack_region + state.stacks_used++ * STACK);
  }
  f.stack = state.free_stacks.back();
  state.free_stacks.pop_back();
  auto** top = reinterpret_cast<void**>(f.stack + STACK - 64);
  *--top = nullptr;  // keeps rsp = 8 (mod 16) on entry
  *--top = reinterpret_cast<void*>(&run_thread);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  f.stack_pointer = top;
}

std::unique_ptr<Block> start_block(const Launch& l, uint64_t linear, std::shared_ptr<Cluster> cluster) {
  const dim3 grid = l.grid, shape = l.block;
  const dim3 index(unsigned(linear % grid.x), unsigned(linear / grid.x % grid.y), unsigned(linear / grid.x / grid.y));
  const size_t dynamic = l.dynamic_shared;
  auto b = std::make_unique<Block>();
  b->index = index;
  b->linear = unsigned(linear);
  b->cluster = std::move(cluster);
  b->cluster->blocks.push_back(b.get());
  b->live = shape.x * shape.y * shape.z;
  if (state.free_arenas.empty()) state.free_arenas.push_back(map_memory(ARENA));
  b->arena = state.free_arenas.back();
  state.free_arenas.pop_back();
  poison(b->arena, ARENA);
  b->used = DYNAMIC_AT + uint32_t(dynamic);
  b->limit = b->used + MAX_STATIC;
  const unsigned warps = (b->live + 31) / 32;
  b->granules.resize(b->limit / GRANULE + 1);
  b->reads.resize(b->granules.size() * warps);
  b->allow(DYNAMIC_AT, uint32_t(dynamic));
  for (unsigned i = 0; i < warps; ++i) {
    auto w = std::make_unique<Warp>();
    w->block = b.get();
    w->id = i;
    w->time.t[i] = 1;
    w->time.t[EARLIER_GRIDS] = !l.early;
    w->priority = random32();
    if (options.seed) {
      w->rotate = random32() % 32;
      w->reverse = random32() & 1;
    }
    state.warps.push_back(w.get());
    b->warps.push_back(std::move(w));
  }
  for (unsigned i = 0; i < b->live; ++i) {
    auto f = std::make_unique<Fiber>();
    f->thread_idx = dim3(i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y);
    f->block_idx = index;
    f->block_dim = shape;
    f->grid_dim = grid;
    f->linear = i;
    f->lane = i % 32;
    f->warp_id = i / 32;
    f->block = b.get();
    f->warp = b->warps[i / 32].get();
    f->warp->exists |= 1u << f->lane;
    f->warp->ready |= 1u << f->lane;
    f->warp->lane[f->lane] = f.get();
    give_stack(*f);
    b->fibers.push_back(std::move(f));
  }
  return b;
}

void end_block(std::unique_ptr<Block>& b) {
  std::replace(b->cluster->blocks.begin(), b->cluster->blocks.end(), b.get(), static_cast<Block*>(nullptr));
  std::erase_if(state.warps, [&](Warp* w) { return w->block == b.get(); });
  for (auto& f : b->fibers) {
    unpoison(f->stack, STACK);
    state.free_stacks.push_back(f->stack);
  }
  unpoison(b->arena, ARENA);
  state.free_arenas.push_back(b->arena);
  b.reset();
  state.last = 0;
}

}  // namespace

void run_grid(const Launch& l, const std::function<void()>& kernel) {
  const uint64_t total = uint64_t(l.grid.x) * l.grid.y * l.grid.z;
  const unsigned threads = l.block.x * l.block.y * l.block.z, window = std::max(options.window, l.cluster);
  if (total == 0 || threads == 0) fail("an empty grid or block");
  if (threads > MAX_WARPS * 32) fail("%u threads per block, more than %u", threads, MAX_WARPS * 32);
  if (l.dynamic_shared > MAX_DYNAMIC)
    fail("%zu bytes of dynamic shared memory, more than %u", l.dynamic_shared, MAX_DYNAMIC);
  if (l.cluster == 0 || l.cluster > 8 || l.grid.x % l.cluster)
    fail("clusters of %u blocks in a grid of %u", l.cluster, l.grid.x);
  state.random = 0x9e3779b97f4a7c15ull * (options.seed + 1);
  state.kernel = &kernel;
  state.idle_rounds = 0;
  state.pdl_waited = false;
  begin_grid(l.early);
  std::vector<std::unique_ptr<Block>> live;
  for (uint64_t next = 0; next < total || !live.empty();) {
    while (next < total && live.size() + l.cluster <= window) {
      const auto cluster = std::make_shared<Cluster>();
      for (unsigned i = 0; i < l.cluster; ++i) live.push_back(start_block(l, next++, cluster));
    }
    switch_to(state.host, choose_lane(choose_warp()));  // comes back when a block has ended
    for (auto& b : live)
      if (b->live == 0) end_block(b);
    std::erase(live, nullptr);
  }
  if (l.early && !state.pdl_waited) fail("a grid launched early ends without pdl_wait");
}

void pdl_wait() {
  this_warp().time.t[EARLIER_GRIDS] = 1;
  state.pdl_waited = true;
}

void fail(const char* format, ...) {
  std::fflush(stdout);
  std::fprintf(stderr, "emu: ");
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  if (self) {
    const dim3 b = self->block_idx;
    std::fprintf(stderr, "\n  in block (%u,%u,%u), thread %u (warp %u, lane %u), seed %u", b.x, b.y, b.z, self->linear,
                 self->warp_id, self->lane, options.seed);
  }
  std::fprintf(stderr, "\n");
  if (__sanitizer_print_stack_trace) __sanitizer_print_stack_trace();
  std::fflush(nullptr);
  std::_Exit(3);
}

// ---------------------------------------------------------------- what the other sources need
void wait(const char* what) {
  this_fiber().waits_for = what;
  this_warp().ready &= ~(1u << self->lane);
  reschedule(false);
}
void yield() {
  if (options.seed % 2 || options.seed == 0 || random32() % 4 == 0) reschedule(true);
}
void progress() { state.idle_rounds = 0; }
bool is_stack(const void* p) {
  const char* c = static_cast<const char*>(p);
  return c >= state.stack_region && c < state.stack_region + STACK * MAX_STACKS;
}

// ---------------------------------------------------------------- meetings
void collective(const char* name, uint32_t mask, void* arg, WarpOp op) {
  Warp& w = this_warp();
  const uint32_t bit = 1u << self->lane;
  mask &= w.exists;
  if (!(mask & bit)) fail("%s: the mask lacks the calling lane", name);
  if (mask & w.exited) fail("%s waits for lanes %08x, which have ended", name, mask & w.exited);
  auto m = w.meetings.end();
  for (auto i = w.meetings.begin(); i != w.meetings.end(); ++i) {
    if (!(i->mask & mask)) continue;
    if (i->mask != mask || std::strcmp(i->name, name))
      fail("lanes diverge: this one is at %s (mask %08x), lanes %08x wait at %s", name, mask, i->arrived, i->name);
    m = i;
  }
  if (m == w.meetings.end()) m = w.meetings.insert(m, Meeting{name, mask, 0, {}});
  m->args[self->lane] = arg;
  m->arrived |= bit;
  if (m->arrived != mask) return wait(name);
  const Meeting complete = *m;
  w.meetings.erase(m);
  op(complete.args, mask, w);
  w.ready |= mask;
  progress();
  yield();
}
void sync_warp(uint32_t mask) {
  collective("__syncwarp", mask, nullptr, [](void* const*, uint32_t, Warp& w) { ++w.epoch; });
}

static void arrive(unsigned id, unsigned count, bool waits) {
  static const char* const names[NAMED_BARRIERS] = {
      "barrier 0", "barrier 1", "barrier 2",  "barrier 3",  "barrier 4",  "barrier 5",  "barrier 6",  "barrier 7",
      "barrier 8", "barrier 9", "barrier 10", "barrier 11", "barrier 12", "barrier 13", "barrier 14", "barrier 15"};
  Block& b = this_block();
  Warp& w = this_warp();
  if (id >= NAMED_BARRIERS || count % 32) fail("barrier %u with %u threads", id, count);
  Barrier& bar = b.barriers[id];
  if (bar.arrived && bar.expected != count)
    fail("barrier %u: this thread expects %u threads, earlier ones %u", id, count, bar.expected);
  bar.expected = count;
  bar.time.join(w.time);
  ++bar.arrived;
  if (waits) {
    bar.waiting[w.id] |= 1u << self->lane;
    bar.warps |= 1u << w.id;
  } else {
    ++w.time.t[w.id];
  }
  progress();
  if (bar.arrived == (count ? count : b.live)) {
    release_barrier(b, bar);
    if (waits) reschedule(true);
  } else if (waits) {
    wait(names[id]);
  }
}
void bar_sync(unsigned id, unsigned count) { arrive(id, count, true); }
void bar_arrive(unsigned id, unsigned count) { arrive(id, count, false); }
void cluster_sync() {
  Block& b = this_block();
  Warp& w = this_warp();
  Barrier& bar = b.cluster_barrier;
  bar.time.join(w.time);
  bar.waiting[w.id] |= 1u << self->lane;
  bar.warps |= 1u << w.id;
  ++b.cluster->arrived;
  progress();
  const uint32_t phase = b.cluster->phase;
  release_cluster_if_due(*b.cluster);
  if (b.cluster->phase != phase) reschedule(true);
  else wait("cluster_sync");
}
void spin() {
  this_warp().spinning |= 1u << self->lane;
  wait("polling loop");
}

}  // namespace emu
