// Shuffles, votes and __syncwarp.
#pragma once
#include "emu.h"

namespace emu {

template <class T> struct Shuffle {
  T value, out;
  int src;  // a lane, or -1 to keep one's own value
};
template <class T> T shuffle(const char* name, unsigned mask, T value, int src) {
  static_assert(sizeof(T) <= 8);
  Shuffle<T> mine{value, value, src};
  collective(name, mask, &mine, [](void* const* args, uint32_t m, Warp&) {
    for (int i = 0; i < 32; ++i) {
      if (!(m >> i & 1)) continue;
      auto* lane = static_cast<Shuffle<T>*>(args[i]);
      if (lane->src < 0) continue;
      if (!(m >> lane->src & 1)) fail("shuffle: lane %d reads lane %d, which is not in the mask", i, lane->src);
      lane->out = static_cast<Shuffle<T>*>(args[lane->src])->value;
    }
  });
  return mine.out;
}
inline unsigned ballot(const char* name, unsigned mask, bool predicate) {
  struct Vote {
    bool predicate;
    unsigned out;
  } mine{predicate, 0};
  collective(name, mask, &mine, [](void* const* args, uint32_t m, Warp&) {
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i)
      if (m >> i & 1) votes |= unsigned(static_cast<Vote*>(args[i])->predicate) << i;
    for (int i = 0; i < 32; ++i)
      if (m >> i & 1) static_cast<Vote*>(args[i])->out = votes;
  });
  return mine.out;
}

}  // namespace emu

inline void __syncwarp(unsigned mask = ~0u) { emu::sync_warp(mask); }

// Within a segment of `width` lanes; a source outside of the segment leaves the lane its own value.
template <class T> T __shfl_sync(unsigned mask, T v, int src, int width = 32) {
  const int lane = int(emu::self->lane);
  return emu::shuffle("__shfl_sync", mask, v, (lane & ~(width - 1)) | (src & (width - 1)));
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32) {
  const int lane = int(emu::self->lane), src = lane ^ bits;
  // Unlike up and down, xor may reach into an earlier segment (PTX ISA, shfl.sync.bfly).
  return emu::shuffle("__shfl_xor_sync", mask, v, src <= (lane | (width - 1)) ? src : -1);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  const int lane = int(emu::self->lane), src = lane + int(delta);
  return emu::shuffle("__shfl_down_sync", mask, v, src <= (lane | (width - 1)) ? src : -1);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  const int lane = int(emu::self->lane), src = lane - int(delta);
  return emu::shuffle("__shfl_up_sync", mask, v, src >= (lane & ~(width - 1)) ? src : -1);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) { return emu::ballot("__ballot_sync", mask, predicate); }
inline int __any_sync(unsigned mask, int predicate) { return emu::ballot("__any_sync", mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return emu::ballot("__all_sync", mask, !predicate) == 0; }
