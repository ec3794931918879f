// Asynchronous copies and the mbarriers that count them. A copy lands as late as the program allows; until then its
// destination is poisoned.
#include "state.h"

namespace emu {

// ---------------------------------------------------------------- destinations
void Block::start_copy(const Copy& c, unsigned thread, const Warp& w) {
  access(c.dst, c.bytes, Use::WRITE, w, w.time, uint8_t(thread % 32));
  for (uint32_t g = c.dst / GRANULE; g < (c.dst + c.bytes) / GRANULE; ++g) granules[g].in_flight = uint16_t(thread + 1);
  std::memset(arena + c.dst, 0xff, c.bytes);
  if (c.bytes >= 8) poison(arena + c.dst, c.bytes);
  else poison_words(c.dst);
}
void Block::finish_copy(const Copy& c, unsigned agent, uint32_t time, uint8_t lane, uint32_t epoch) {
  for (uint32_t g = c.dst / GRANULE; g < (c.dst + c.bytes) / GRANULE; ++g) {
    granules[g].in_flight = 0;
    granules[g].writer = uint8_t(agent);
    granules[g].clock = time;
    granules[g].lane = lane;
    granules[g].epoch = epoch;
  }
  if (c.bytes >= 8) unpoison(arena + c.dst, c.bytes);
  else poison_words(c.dst);
  std::memcpy(arena + c.dst, c.src, c.src_bytes);  // AddressSanitizer checks memcpy and memset even here
  std::memset(arena + c.dst + c.src_bytes, 0, c.bytes - c.src_bytes);
}
// AddressSanitizer keeps one state per 8 bytes: it can forbid both words or the second, not the first alone.
void Block::poison_words(uint32_t at) {
  at &= ~7u;
  const bool first = granules[at / GRANULE].in_flight, second = granules[(at + 4) / GRANULE].in_flight;
  unpoison(arena + at, 8);
  if (second) poison(arena + at + (first ? 0 : 4), first ? 8 : 4);
}

// ---------------------------------------------------------------- cp.async
void cp_async(uint32_t dst, const void* src, unsigned bytes, unsigned src_bytes) {
  if (dst % bytes || (src_bytes && reinterpret_cast<uintptr_t>(src) % bytes))
    fail("misaligned cp.async: shared 0x%x, global %p, %u bytes", dst, src, bytes);
  if (src_bytes > bytes) fail("cp.async: source size %u above %u", src_bytes, bytes);
  const Copy copy{dst, static_cast<const char*>(src), bytes, src_bytes};
  check_earlier_grids(src, src_bytes, false);
  this_block().start_copy(copy, self->linear, this_warp());
  this_fiber().cp_async_open.push_back(copy);
}
void cp_async_commit() {
  Fiber& f = this_fiber();
  f.cp_async_groups.push_back(std::move(f.cp_async_open));
  f.cp_async_open.clear();
}
void cp_async_wait(unsigned pending) {
  Fiber& f = this_fiber();
  const Warp& w = this_warp();
  for (; f.cp_async_groups.size() > pending; f.cp_async_groups.pop_front())
    for (const Copy& c : f.cp_async_groups.front())
      this_block().finish_copy(c, w.id, w.time.t[w.id], uint8_t(f.lane), w.epoch);
}

// ---------------------------------------------------------------- mbarriers
static MBarrier& mbarrier(uint32_t at) {
  Block& b = this_block();
  const auto it = b.mbarriers.find(at);
  if (it == b.mbarriers.end()) fail("no mbarrier at shared 0x%x", at);
  if (it->second.init_clock > this_warp().time.t[it->second.init_warp])
    fail("mbarrier 0x%x is used without a barrier after its initialization", at);
  return it->second;
}
// A waiter knows phases by their parity: if another one is completed before it looks, it waits for ever.
static void complete_phase_if_due(uint32_t at, MBarrier& m) {
  if (m.pending || m.pending_bytes) return;
  const auto known = [&](const auto& waiter) { return waiter.second <= m.time.t[waiter.first]; };
  if (m.any_completed && std::none_of(m.waited.begin(), m.waited.end(), known))
    fail("mbarrier 0x%x (dynamic %+d): a phase is completed, not ordered after any wait for the one before", at,
         int(at) - int(DYNAMIC_AT));
  m.any_completed = true;
  m.waited.clear();
  m.completed = m.time;
  m.phase ^= 1;
  m.pending = m.expected;
  for (Fiber* f : m.waiters) f->warp->ready |= 1u << f->lane;
  m.waiters.clear();
}

void mbar_init(uint32_t at, uint32_t count) {
  Block& b = this_block();
  Warp& w = this_warp();
  if (at % 8 || count == 0) fail("mbarrier.init: address 0x%x, count %u", at, count);
  b.access(at, 8, Use::WRITE, w, w.time, uint8_t(self->lane));
  if (b.mbarriers.size() >= MAX_MBARS) fail("more than %u mbarriers", MAX_MBARS);
  MBarrier m{};
  m.expected = m.pending = count;
  m.agent = MAX_WARPS + unsigned(b.mbarriers.size());
  m.init_warp = w.id;
  m.init_clock = w.time.t[w.id];
  if (!b.mbarriers.emplace(at, m).second) fail("mbarrier 0x%x initialized twice", at);
}
void mbar_arrive(uint32_t at, uint32_t expect_bytes) {
  MBarrier& m = mbarrier(at);
  Warp& w = this_warp();
  if (m.pending == 0) fail("mbarrier 0x%x: more arrivals than its count of %u", at, m.expected);
  m.time.join(w.time);
  ++w.time.t[w.id];
  m.pending_bytes += expect_bytes;
  --m.pending;
  progress();
  complete_phase_if_due(at, m);
}
void mbar_wait(uint32_t at, uint32_t parity) {
  MBarrier& m = mbarrier(at);
  while (m.phase == (parity & 1)) {
    m.waiters.push_back(&this_fiber());
    wait("mbarrier");
  }
  Warp& w = this_warp();
  w.time.join(m.completed);
  m.waited.emplace(w.id, w.time.t[w.id]);
  progress();
}

// ---------------------------------------------------------------- bulk and tensor copies
static void start_bulk_copy(BulkCopy&& copy) {
  for (const Copy& part : copy.parts) {
    check_earlier_grids(part.src, part.src_bytes, false);
    this_block().start_copy(part, copy.thread, this_warp());
  }
  copy.earlier_grids = this_warp().time.t[EARLIER_GRIDS];
  this_block().bulk_copies.push_back(std::move(copy));
}
void finish_bulk_copy(Block& b, const BulkCopy& copy) {
  MBarrier& m = b.mbarriers.at(copy.bar);
  const uint32_t time = ++m.time.t[m.agent];
  for (const Copy& part : copy.parts) b.finish_copy(part, m.agent, time, ALL_LANES, 0);
  m.time.t[EARLIER_GRIDS] = std::max(m.time.t[EARLIER_GRIDS], copy.earlier_grids);
  m.pending_bytes -= copy.bytes;
  complete_phase_if_due(copy.bar, m);
}
void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  if (dst % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(src) % 16)
    fail("misaligned bulk copy: shared 0x%x, global %p, %u bytes", dst, src, bytes);
  mbarrier(bar);
  start_bulk_copy({{{dst, static_cast<const char*>(src), bytes, bytes}}, bar, bytes, self->linear, 0});
}
// The 16-byte chunks of a box, which keep together in the swizzle: their place in shared memory and the bytes of global
// memory behind it, fewer or none where the box leaves the matrix.
template <class F> static void for_each_chunk(const TensorMap& map, int inner, int outer, uint32_t shared, F f) {
  constexpr int CHUNK = 16, BOX_ROW = 128;
  if (shared % BOX_ROW) fail("tensor copy: shared 0x%x is not a multiple of 128", shared);
  const int64_t row_end = int64_t(map.inner) * 2;
  for (int r = 0; r < int(map.box_rows); ++r)
    for (int c = 0; c < BOX_ROW; c += CHUNK) {
      const int64_t row = int64_t(outer) + r, byte = int64_t(inner) * 2 + c;
      const int64_t skipped = std::max<int64_t>(-byte, 0), end = std::min<int64_t>(row_end - byte, CHUNK);
      const bool inside = row >= 0 && row < int64_t(map.outer) && skipped < end;
      if (inside && skipped) fail("tensor copy: an inner coordinate of %d is not modelled", inner);
      char* global = static_cast<char*>(const_cast<void*>(map.base)) + row * int64_t(map.row_bytes) + byte;
      f(swizzle128(shared + uint32_t(r * BOX_ROW + c)), inside ? global : nullptr, inside ? unsigned(end) : 0);
    }
}

const char* tensor_load(uint32_t dst, const TensorMap& map, int inner, int outer, uint32_t bar) {
  mbarrier(bar);
  BulkCopy copy{{}, bar, 128 * map.box_rows, self->linear, 0};
  const char* bad = nullptr;
  for_each_chunk(map, inner, outer, dst, [&](uint32_t at, const char* src, unsigned bytes) {
    copy.parts.push_back({at, src, 16, bytes});
    if (!bad) bad = first_poisoned(src, bytes);
  });
  start_bulk_copy(std::move(copy));
  return bad;
}

// Reads shared memory in bulk_wait_read and writes global memory in bulk_wait, both as late as allowed. What is read
// must be ordered before the issue, and must not change until it has been read.
static void check_store(const TensorStore& store) {
  for (const TensorStore::Part& p : store.parts)
    this_block().access(p.src, p.bytes, Use::TENSOR_STORE, this_warp(), store.time, uint8_t(self->lane));
}
char* tensor_store(const TensorMap& map, int inner, int outer, uint32_t src) {
  Warp& w = this_warp();
  TensorStore& store = this_fiber().stores_open.emplace_back();
  store.time = w.time;
  char* bad = nullptr;
  for_each_chunk(map, inner, outer, src, [&](uint32_t at, char* dst, unsigned bytes) {
    if (bytes) store.parts.push_back({at, dst, bytes, {}});
    check_earlier_grids(dst, bytes, true);
    if (!bad) bad = const_cast<char*>(first_poisoned(dst, bytes));
  });
  check_store(store);
  ++w.time.t[w.id];  // this warp's later writes come after the issue
  return bad;
}
void bulk_commit() {
  Fiber& f = this_fiber();
  f.store_groups.push_back(std::move(f.stores_open));
  f.stores_open.clear();
}
void bulk_wait_read(unsigned pending) {
  auto& groups = this_fiber().store_groups;
  for (size_t i = 0; i + pending < groups.size(); ++i)
    for (TensorStore& store : groups[i]) {
      if (store.read) continue;
      check_store(store);
      for (TensorStore::Part& p : store.parts) std::memcpy(p.data, this_block().arena + p.src, p.bytes);
      store.read = true;
    }
}
void bulk_wait(unsigned pending) {
  bulk_wait_read(pending);
  auto& groups = this_fiber().store_groups;
  for (; groups.size() > pending; groups.pop_front())
    for (const TensorStore& store : groups.front())
      for (const TensorStore::Part& p : store.parts) {
        observe_global_write(p.dst, p.bytes);
        std::memcpy(p.dst, p.data, p.bytes);
      }
}
void fence_proxy_async() {
  Warp& w = this_warp();
  this_fiber().proxy_fenced = w.time.t[w.id]++;
}

const char* first_poisoned(const void* p, size_t n) {
  if (!__asan_region_is_poisoned || n == 0) return nullptr;
  return static_cast<const char*>(__asan_region_is_poisoned(const_cast<void*>(p), n));
}

}  // namespace emu
