// wgmma for sm_90a: weights in registers, tokens in shared memory, float accumulators. Part of ptx.cuh.
#pragma once

namespace ptx {

PTX_INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PTX_INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> PTX_INLINE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Nothing in the text of wgmma_wait tells the compiler that the accumulators change there: it must not read them
// before. Stands after the last wait.
template <int R> PTX_INLINE void pin(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The accumulators' operands, as text and as constraints, each list twice as long as the one before.
#define PTX_T4 "%0,%1,%2,%3"
#define PTX_T8 PTX_T4 ",%4,%5,%6,%7"
#define PTX_T16 PTX_T8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PTX_T32 PTX_T16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PTX_T64                                                      \
  PTX_T32                                                            \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PTX_T128                                                                 \
  PTX_T64                                                                        \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"             \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define PTX_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PTX_D8(i) PTX_D4(i), PTX_D4(i + 4)
#define PTX_D16(i) PTX_D8(i), PTX_D8(i + 8)
#define PTX_D32(i) PTX_D16(i), PTX_D16(i + 16)
#define PTX_D64(i) PTX_D32(i), PTX_D32(i + 32)
#define PTX_D128(i) PTX_D64(i), PTX_D64(i + 64)

#define PTX_WGMMA_ASM(R, N, types, w_text, x_text)                                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." types " {" PTX_T##R "}, {" w_text "}, " x_text \
                                                                                     ", 1, 1, 1, 0;"            \
               : PTX_D##R(0)                                                                                    \
               : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x))
#define PTX_WGMMA_SP_ASM(R, N, types, w_text, x_text, meta_text)                                                       \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32." types " {" PTX_T##R "}, {" w_text "}, " x_text     \
                                                                                        ", " meta_text ", 1, 1, 1, 0;" \
               : PTX_D##R(0)                                                                                           \
               : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(meta), "n"(SELECTOR))
// d[64 x n] += w[64 x 16] * x[16 x n], or w[64 x 32, 2:4] * x[32 x n], for the n that is twice the length of d; x is
// the descriptor of an n x k tile, k contiguous. The operands after the R accumulators have numbers that must be
// written out.
#define PTX_WGMMA(R, N, w_text, x_text, meta_text)                                              \
  template <class T> PTX_INLINE void wgmma(float (&d)[R], const uint32_t (&w)[4], uint64_t x) { \
    PTX_FLOAT16(T);                                                                             \
    if constexpr (is_bf16<T>)                                                                   \
      PTX_WGMMA_ASM(R, N, "bf16.bf16", w_text, x_text);                                         \
    else                                                                                        \
      PTX_WGMMA_ASM(R, N, "f16.f16", w_text, x_text);                                           \
  }                                                                                             \
  template <class T, int SELECTOR>                                                              \
  PTX_INLINE void wgmma_sp(float (&d)[R], const uint32_t (&w)[4], uint64_t x, uint32_t meta) {  \
    PTX_FLOAT16(T);                                                                             \
    if constexpr (is_bf16<T>)                                                                   \
      PTX_WGMMA_SP_ASM(R, N, "bf16.bf16", w_text, x_text, meta_text);                           \
    else                                                                                        \
      PTX_WGMMA_SP_ASM(R, N, "f16.f16", w_text, x_text, meta_text);                             \
  }
PTX_WGMMA(4, 8, "%4,%5,%6,%7", "%8", "%9, %10")
PTX_WGMMA(8, 16, "%8,%9,%10,%11", "%12", "%13, %14")
PTX_WGMMA(16, 32, "%16,%17,%18,%19", "%20", "%21, %22")
PTX_WGMMA(32, 64, "%32,%33,%34,%35", "%36", "%37, %38")
PTX_WGMMA(64, 128, "%64,%65,%66,%67", "%68", "%69, %70")
PTX_WGMMA(128, 256, "%128,%129,%130,%131", "%132", "%133, %134")
#undef PTX_WGMMA
#undef PTX_WGMMA_ASM
#undef PTX_WGMMA_SP_ASM
#undef PTX_T4
#undef PTX_T8
#undef PTX_T16
#undef PTX_T32
#undef PTX_T64
#undef PTX_T128
#undef PTX_D4
#undef PTX_D8
#undef PTX_D16
#undef PTX_D32
#undef PTX_D64
#undef PTX_D128

}  // namespace ptx
