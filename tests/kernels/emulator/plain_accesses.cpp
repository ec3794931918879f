// Our own runtime for code compiled with -fsanitize=thread: plain loads and stores reach the race checker. Linked into
// the race build only, without -fsanitize=thread.
#include <cstddef>

namespace emu {
void observe(const void* p, size_t n, bool write);
}

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define EMU_ACCESS(n)                                                       \
  void __tsan_read##n(void* p) { emu::observe(p, n, false); }               \
  void __tsan_write##n(void* p) { emu::observe(p, n, true); }               \
  void __tsan_unaligned_read##n(void* p) { emu::observe(p, n, false); }     \
  void __tsan_unaligned_write##n(void* p) { emu::observe(p, n, true); }     \
  void __tsan_volatile_read##n(void* p) { emu::observe(p, n, false); }      \
  void __tsan_volatile_write##n(void* p) { emu::observe(p, n, true); }
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
void __tsan_read_range(void* p, size_t n) { emu::observe(p, n, false); }
void __tsan_write_range(void* p, size_t n) { emu::observe(p, n, true); }
}
