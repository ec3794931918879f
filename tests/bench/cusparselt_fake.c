/* As much of cuSPARSELt as is called, on the CPU: it checks what it is given, and multiplies bfloat16.
   Its compressed weights are the even columns of w; whatever follows them is not read. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 3, UNSUPPORTED = 10 };
enum { COL = 1, ROW = 2, F16 = 2, BF16 = 14 };

typedef struct { uint64_t ready; } Handle;
typedef struct { int64_t rows, cols, ld; int type, order, structured; } Matrix;
typedef struct { const Matrix *a, *b, *d; } Matmul;
typedef struct { const Matmul* matmul; int algorithm; } Selection;
typedef struct { const Selection* selection; } Plan;

int version[3] = {0, 8, 0};
int plans, living, products, last_type; /* how many were made; how many are not destroyed yet */

static int bad(const void* p) { return p == NULL || (uintptr_t)p % 16 != 0; }
static int bad_handle(const Handle* h) { return bad(h) || h->ready != 1; }

int cusparseLtGetProperty(int which, int* value) {
  *value = version[which];
  return SUCCESS;
}

const char* cusparseLtGetErrorString(int status) {
  return status == UNSUPPORTED ? "operation not supported" : status == INVALID ? "invalid value" : "?";
}

int cusparseLtInit(Handle* h) {
  if (bad(h)) return INVALID;
  h->ready = 1;
  return SUCCESS;
}

static int matrix(const Handle* h, Matrix* m, Matrix value, uint32_t alignment) {
  if (bad_handle(h) || bad(m) || alignment != 16) return INVALID;
  if (value.ld != (value.order == ROW ? value.cols : value.rows) || value.rows % 8 || value.cols % 8) return INVALID;
  if (value.type != F16 && value.type != BF16) return INVALID;
  *m = value;
  last_type = value.type;
  ++living;
  return SUCCESS;
}

int cusparseLtDenseDescriptorInit(
    const Handle* h, Matrix* m, int64_t rows, int64_t cols, int64_t ld, uint32_t alignment, int type, int order) {
  return matrix(h, m, (Matrix){rows, cols, ld, type, order, 0}, alignment);
}

int cusparseLtStructuredDescriptorInit(
    const Handle* h, Matrix* m, int64_t rows, int64_t cols, int64_t ld, uint32_t alignment, int type, int order,
    int sparsity) {
  if (sparsity != 0) return INVALID;
  return matrix(h, m, (Matrix){rows, cols, ld, type, order, 1}, alignment);
}

int cusparseLtMatDescriptorDestroy(const Matrix* m) {
  --living;
  return bad(m) ? INVALID : SUCCESS;
}

int cusparseLtMatmulDescriptorInit(
    const Handle* h, Matmul* m, int op_a, int op_b, const Matrix* a, const Matrix* b, const Matrix* c, const Matrix* d,
    int compute) {
  if (bad_handle(h) || bad(m) || op_a != 0 || op_b != 1 || compute != 2 || c != d) return INVALID;
  if (!a->structured || b->structured || d->structured) return INVALID;
  if (a->order != ROW || b->order != ROW || d->order != COL) return INVALID;
  if (a->cols != b->cols || d->rows != a->rows || d->cols != b->rows) return INVALID;
  *m = (Matmul){a, b, d};
  return SUCCESS;
}

int cusparseLtMatmulAlgSelectionInit(const Handle* h, Selection* s, const Matmul* m, int algorithm) {
  if (bad_handle(h) || bad(s) || algorithm != 0) return INVALID;
  *s = (Selection){m, -1};
  return SUCCESS;
}

int cusparseLtMatmulAlgGetAttribute(const Handle* h, const Selection* s, int which, void* data, size_t size) {
  if (bad_handle(h) || which != 1 || size != sizeof(int)) return INVALID;
  *(int*)data = s->matmul->a->rows == 16 ? 4 : 3;
  return SUCCESS;
}

int cusparseLtMatmulAlgSetAttribute(const Handle* h, Selection* s, int which, const void* data, size_t size) {
  if (bad_handle(h) || which != 0 || size != sizeof(int)) return INVALID;
  s->algorithm = *(const int*)data;
  return s->algorithm < 4 ? SUCCESS : INVALID;
}

int cusparseLtMatmulPlanInit(const Handle* h, Plan* p, const Matmul* m, const Selection* s) {
  if (bad_handle(h) || bad(p) || s->matmul != m) return INVALID;
  if (s->algorithm == 2) return UNSUPPORTED;
  p->selection = s;
  ++plans;
  ++living;
  return SUCCESS;
}

int cusparseLtMatmulPlanDestroy(const Plan* p) {
  --living;
  return p->selection->matmul->a == NULL ? INVALID : SUCCESS; /* what it points to is still there */
}

int cusparseLtMatmulGetWorkspace(const Handle* h, const Plan* p, size_t* size) {
  *size = 1000 * p->selection->algorithm;
  return bad_handle(h) ? INVALID : SUCCESS;
}

static float widen(uint16_t bits) {
  const uint32_t whole = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &whole, sizeof value);
  return value;
}

int cusparseLtMatmul(
    const Handle* h, const Plan* p, const float* alpha, const uint16_t* a, const uint16_t* b, const float* beta,
    const uint16_t* c, uint16_t* d, char* workspace, void** streams, int32_t num_streams) {
  const Matmul* m = p->selection->matmul;
  const int64_t n = m->a->rows, k = m->a->cols, tokens = m->b->rows;
  if (bad_handle(h) || *alpha != 1 || *beta != 0 || c != d) return INVALID;
  if (num_streams != 1 || *streams != (void*)0x7700000077) return INVALID;
  if ((workspace == NULL) != (p->selection->algorithm == 0)) return INVALID;
  if (workspace != NULL) memset(workspace, 1, 1000 * p->selection->algorithm);
  for (int64_t i = 0; i < tokens; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t l = 0; l < k / 2; ++l) sum += widen(b[i * k + 2 * l]) * widen(a[j * k / 2 + l]);
      uint32_t bits;
      memcpy(&bits, &sum, sizeof bits);
      d[i * n + j] = bits >> 16;
    }
  }
  ++products;
  return SUCCESS;
}
