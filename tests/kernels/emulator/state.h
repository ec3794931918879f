// What the emulator knows of a running grid. Private to the emulator's own sources.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "emu.h"

// Present only when the program is linked with AddressSanitizer.
extern "C" {
__attribute__((weak)) void __asan_poison_memory_region(const volatile void*, size_t);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void*, size_t);
__attribute__((weak)) void* __asan_region_is_poisoned(void*, size_t);
}

namespace emu {

constexpr unsigned MAX_WARPS = 32, MAX_MBARS = 64, NAMED_BARRIERS = 16;
constexpr unsigned EARLIER_GRIDS = MAX_WARPS + MAX_MBARS, AGENTS = EARLIER_GRIDS + 1;
// A block's shared memory lies in an arena: nothing at address 0, the dynamic part, then the static arrays.
constexpr unsigned ARENA = 256 * 1024, DYNAMIC_AT = 1024, MAX_DYNAMIC = 227 * 1024, MAX_STATIC = 16 * 1024;
constexpr unsigned GRANULE = 2;  // bytes of shared memory watched as one

inline void poison(const void* p, size_t n) {
  if (__asan_poison_memory_region) __asan_poison_memory_region(p, n);
}
inline void unpoison(const void* p, size_t n) {
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(p, n);
}

// ---------------------------------------------------------------- time
// Vector clock within a block. Agents are its warps, then the copy engine behind each mbarrier, then all earlier grids,
// whose time is 1 where they are known to have ended.
struct Clock {
  uint32_t t[AGENTS] = {};
  void join(const Clock& other) {
    for (unsigned i = 0; i < AGENTS; ++i) t[i] = std::max(t[i], other.t[i]);
  }
};
// Between blocks: the clocks of whole blocks.
using BlockClock = std::map<unsigned, uint32_t>;
inline void join(BlockClock& into, const BlockClock& from) {
  for (auto& [block, time] : from) into[block] = std::max(into[block], time);
}

// ---------------------------------------------------------------- what waits, and what is in flight
struct Copy {
  uint32_t dst;
  const char* src;
  unsigned bytes, src_bytes;
};
struct BulkCopy {
  std::vector<Copy> parts;
  uint32_t bar, bytes;
  unsigned thread;
  uint32_t earlier_grids;  // their time when it was issued
};
struct TensorStore {
  struct Part {
    uint32_t src;
    char* dst;
    unsigned bytes;
    char data[16];  // once it has been read
  };
  std::vector<Part> parts;
  Clock time;  // of the issue
  bool read = false;
};
struct Fiber : Thread {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  const char* waits_for = "start";
  std::vector<Copy> cp_async_open;
  std::deque<std::vector<Copy>> cp_async_groups;
  std::vector<TensorStore> stores_open;
  std::deque<std::vector<TensorStore>> store_groups;
  uint32_t proxy_fenced = 0;  // its warp's clock at the last fence.proxy.async
};
struct Meeting {  // lanes on their way to a warp-wide instruction
  const char* name;
  uint32_t mask, arrived;
  void* args[32];
};
struct Barrier {
  unsigned expected = 0, arrived = 0;
  Clock time;
  uint32_t waiting[MAX_WARPS] = {}, warps = 0;
};
struct MBarrier {
  uint32_t expected, pending, phase = 0;
  int64_t pending_bytes = 0;
  unsigned agent, init_warp;
  uint32_t init_clock;
  Clock time, completed;  // of the phase that runs, and of the last one
  bool any_completed = false;
  std::map<unsigned, uint32_t> waited;  // who has waited for the last one: warp, and its clock after that
  std::vector<Fiber*> waiters;
};
struct WgmmaInFlight {
  Wgmma lane[32];
  uint32_t w[32][4];
  Clock time;
};
struct Accumulator {  // of one lane; its registers are poisoned until the last wgmma on them is waited for
  std::vector<float> value;
  int uses = 0;
};

// ---------------------------------------------------------------- shared memory
constexpr uint8_t NOBODY = 255;   // no agent
constexpr uint8_t ALL_LANES = 32;
struct Cluster {               // of blocks
  std::vector<Block*> blocks;  // null when they have ended
  unsigned arrived = 0;        // threads in cluster_sync
  uint32_t phase = 1;          // one more after each cluster_sync
};

enum class Use : uint8_t { READ, WRITE, WGMMA, TENSOR_STORE };  // the last two read asynchronously
struct Granule {
  bool valid = false;
  uint8_t writer = NOBODY;  // agent
  uint16_t in_flight = 0;   // 1 + the thread whose asynchronous copy writes here
  uint32_t clock = 0;       // the writer's, when it wrote
  // Between lanes of one warp: epochs end at __syncwarp and at barriers.
  uint32_t epoch = 0, read_epoch = 0;
  uint8_t lane = ALL_LANES, read_lane = ALL_LANES, read_warp = NOBODY;
  Use last_read = Use::READ;
};

struct Warp {
  Block* block;
  unsigned id;
  unsigned priority = 0, rotate = 0;  // the schedule: between warps, and where the search for a lane begins
  bool reverse = false;
  uint32_t exists = 0, exited = 0, ready = 0, spinning = 0;
  Fiber* lane[32] = {};
  std::vector<Meeting> meetings;
  Clock time;
  uint32_t epoch = 1;
  bool wgmma_fenced = false;
  std::vector<WgmmaInFlight> wgmma_open;
  std::deque<std::vector<WgmmaInFlight>> wgmma_groups;
  std::unordered_map<float*, Accumulator> accumulators;
};

struct Block {
  dim3 index;
  unsigned linear = 0, live = 0;  // index, and threads that have not ended
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<std::unique_ptr<Warp>> warps;
  Barrier barriers[NAMED_BARRIERS];
  std::map<uint32_t, MBarrier> mbarriers;
  std::deque<BulkCopy> bulk_copies;

  char* arena = nullptr;
  uint32_t limit = 0, used = 0;
  std::map<const void*, uint32_t> statics;
  std::vector<Granule> granules;
  std::vector<uint32_t> reads;  // [granule][warp]: the reader's clock

  std::shared_ptr<Cluster> cluster;
  Barrier cluster_barrier;              // of this block's threads
  Clock synced;                         // what the last cluster_sync has shown to the other blocks
  std::vector<uint32_t> cluster_reads;  // [granule]: the phase of the last read by another block
  uint32_t last_cluster_read = 0;

  uint32_t clock = 1;
  BlockClock seen;     // what has reached this block from others
  BlockClock pending;  // what relaxed accesses have read: seen after the next fence
  BlockClock fenced;   // what relaxed accesses publish: `seen` at the last fence

  void allow(uint32_t at, uint32_t bytes);
  void forbid(uint32_t at, uint32_t bytes);
  // Checks an access to shared memory and remembers it. `time` is the warp's, or that of the instruction's issue.
  void access(uint32_t at, uint32_t bytes, Use use, const Warp& warp, const Clock& time, uint8_t lane);
  // The same for another block of the cluster.
  void cluster_read(uint32_t at, uint32_t bytes);
  void start_copy(const Copy& copy, unsigned thread, const Warp& warp);
  void finish_copy(const Copy& copy, unsigned agent, uint32_t clock, uint8_t lane, uint32_t epoch);

 private:
  void poison_words(uint32_t at);
};

inline Fiber& this_fiber() { return *static_cast<Fiber*>(self); }
inline Warp& this_warp() { return *self->warp; }
inline Block& this_block() { return *self->block; }

// ---------------------------------------------------------------- scheduler
void wait(const char* what);  // until somebody sets this lane's ready bit
void yield();                 // lets another warp run if the schedule says so
void progress();              // polling loops may hope again
bool is_stack(const void* p);

// ---------------------------------------------------------------- what one source offers another
void finish_bulk_copy(Block& block, const BulkCopy& copy);
void observe_global_write(const void* p, size_t n);  // by an asynchronous copy of this block
// Fails if this thread may not touch global memory because earlier grids may still run.
void check_earlier_grids(const void* p, size_t n, bool write);
void begin_grid(bool early);
// The 128-byte swizzle of tensor copies and wgmma: bits 4 to 6 of an address, xor bits 7 to 9.
inline uint32_t swizzle128(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

}  // namespace emu
