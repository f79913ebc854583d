// cuBLAS: each product is one kernel. Of cuDNN, which version it would be.
#include "device.h"

static thread_local std::map<void*, cudaStream_t> blas_streams;
static char gemm;
[[maybe_unused]] static bool is_named = (names[&gemm] = "a product of cuBLAS's", true);
static int product(void* h) { return launch(&gemm, dim3{132, 1, 1}, dim3{128, 1, 1}, nullptr, 0, blas_streams[h]) ? 13 : 0; }
API int cublasCreate_v2(void** h) { *h = new char[64]; return 0; }
API int cublasDestroy_v2(void*) { return 0; }
API int cublasSetStream_v2(void* h, cudaStream_t s) { blas_streams[h] = s; return 0; }
API int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }
API int cublasSetMathMode(void*, int) { return 0; }
API int cublasGetMathMode(void*, int* m) { *m = 0; return 0; }
API int cublasSetPointerMode_v2(void*, int) { return 0; }
API int cublasGetPointerMode_v2(void*, int* m) { *m = 0; return 0; }
API int blas_product(void* h) { return product(h); }
// the handle is their first argument, and nothing is asked of the others
#define PRODUCT(name) __asm__(".globl " #name "\n.set " #name ", blas_product\n");
PRODUCT(cublasCgemmStridedBatched)
PRODUCT(cublasCgemm_v2)
PRODUCT(cublasCgemv_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasDotEx)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasZgemmStridedBatched)
PRODUCT(cublasZgemm_v2)
API size_t cublasLtGetVersion() { return 130100; }
static int described(void** d) { *d = new char[512]; return 0; }
API int cublasLtMatmulDescCreate(void** d, int, int) { return described(d); }
API int cublasLtMatmulDescDestroy(void*) { return 0; }
API int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatmulPreferenceCreate(void** d) { return described(d); }
API int cublasLtMatmulPreferenceDestroy(void*) { return 0; }
API int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }
API int cublasLtMatrixLayoutCreate(void** d, int, uint64_t, uint64_t, int64_t) { return described(d); }
API int cublasLtMatrixLayoutDestroy(void*) { return 0; }
API int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
struct BlasLtChoice { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; };
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, BlasLtChoice* choice, int* n) {
  memset(choice, 0, sizeof *choice);
  *n = 1;
  return 0;
}
API int cublasLtMatmul(void* h, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*, void*, const void*, void*, size_t, cudaStream_t s) {
  blas_streams[h] = s;
  return product(h);
}
API int cudnnGetProperty(int which, int* v) { *v = which == 0 ? 9 : which == 1 ? 19 : 0; return 0; }
