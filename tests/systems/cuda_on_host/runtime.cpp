// What torch is linked with.
#include "device.h"

// -- errors, devices
API cudaError_t cudaGetLastError() { auto e = last; last = cudaSuccess; return e; }
API cudaError_t cudaPeekAtLastError() { return last; }
API const char* cudaGetErrorName(cudaError_t e) {
  switch (e) {
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorStreamCaptureImplicit: return "cudaErrorStreamCaptureImplicit";
    case cudaErrorStreamCaptureMerge: return "cudaErrorStreamCaptureMerge";
    case cudaErrorStreamCaptureUnmatched: return "cudaErrorStreamCaptureUnmatched";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    case cudaErrorStreamCaptureWrongThread: return "cudaErrorStreamCaptureWrongThread";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaSuccess: return "cudaSuccess";
    default: return "another CUDA error";
  }
}
API const char* cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(e); }
API cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
API cudaError_t cudaGetDevice(int* d) { *d = 0; return cudaSuccess; }
API cudaError_t cudaSetDevice(int) { return cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* v) { *v = 13000; return cudaSuccess; }
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) { *v = attribute(a); return cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", device_name);
  p->totalGlobalMem = TOTAL, p->sharedMemPerBlock = 49152, p->regsPerBlock = 65536, p->warpSize = 32, p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = 9, p->minor = 0, p->multiProcessorCount = 132, p->concurrentKernels = 1, p->asyncEngineCount = 3, p->unifiedAddressing = 1;
  p->l2CacheSize = 62914560, p->maxThreadsPerMultiProcessor = 2048, p->sharedMemPerMultiprocessor = 233472, p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlockOptin = 232448, p->memoryBusWidth = 6016, p->maxBlocksPerMultiProcessor = 32, p->cooperativeLaunch = 1, p->totalConstMem = 65536;
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char* id, int n, int) { snprintf(id, n, "0000:01:00.0"); return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { if (least) *least = 0; if (most) *most = -5; return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  std::lock_guard<std::recursive_mutex> g(lock);
  for (auto stream : streams) host_ms = std::max(host_ms, stream->ms);
  return unsafe("cudaDeviceSynchronize");
}
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* m) { std::swap(*m, thread_mode); return cudaSuccess; }

// -- memory
API cudaError_t cudaMalloc(void** p, size_t n) { std::lock_guard<std::recursive_mutex> g(lock); if (auto e = unsafe("cudaMalloc")) return e; return allocate(p, n, cudaMemoryTypeDevice); }
API cudaError_t cudaFree(void* p) { std::lock_guard<std::recursive_mutex> g(lock); if (p) if (auto e = unsafe("cudaFree")) return e; return release(p); }
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { std::lock_guard<std::recursive_mutex> g(lock); if (auto e = unsafe("cudaHostAlloc")) return e; return allocate(p, n, cudaMemoryTypeHost); }
API cudaError_t cudaFreeHost(void* p) { return release(p); }
API cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return allocate(p, n, cudaMemoryTypeDevice); }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return release(p); }
API cudaError_t cudaMemGetInfo(size_t* free_, size_t* total) { *total = TOTAL, *free_ = TOTAL - held; return cudaSuccess; }
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  std::lock_guard<std::recursive_mutex> g(lock);
  memset(a, 0, sizeof *a);
  auto found = block(p);
  a->type = found ? (cudaMemoryType)found->second.second : cudaMemoryTypeUnregistered;
  a->device = 0, a->devicePointer = (void*)p, a->hostPointer = found && a->type == cudaMemoryTypeHost ? (void*)p : nullptr;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) {
  return put(s, CU_GRAPH_NODE_TYPE_MEMCPY, [=] { memmove(to, from, n); });
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind k) { std::lock_guard<std::recursive_mutex> g(lock); if (auto e = unsafe("cudaMemcpy")) return e; return cudaMemcpyAsync(to, from, n, k, 0); }
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) { return cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, s); }
API cudaError_t cudaMemcpy2DAsync(void* to, size_t tp, const void* from, size_t fp, size_t w, size_t h, cudaMemcpyKind, cudaStream_t s) {
  return put(s, CU_GRAPH_NODE_TYPE_MEMCPY, [=] { for (size_t i = 0; i < h; i++) memmove((char*)to + i * tp, (char*)from + i * fp, w); });
}
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void** p, const void*) { static char symbol[65536]; *p = symbol; return cudaSuccess; }
API cudaError_t cudaMemsetAsync(void* p, int v, size_t n, cudaStream_t s) {
  Node* node = nullptr;
  auto e = put(s, CU_GRAPH_NODE_TYPE_MEMSET, [=] { memset(p, v, n); }, &node);
  if (node) node->memset_ = {(CUdeviceptr)p, 0, (unsigned)v, 1, n, 1};
  return e;
}
API cudaError_t cudaMemset(void* p, int v, size_t n) { return cudaMemsetAsync(p, v, n, 0); }

// -- streams and events
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
  auto stream = new Stream;
  stream->priority = priority, stream->flags = flags;
  std::lock_guard<std::recursive_mutex> g(lock);
  streams.insert(stream);
  *s = (cudaStream_t)stream;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) { *p = of(s)->priority; return cudaSuccess; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  std::lock_guard<std::recursive_mutex> g(lock);
  if (auto c = of(s)->capture) { invalidate(c); return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize"); }
  host_ms = std::max(host_ms, of(s)->ms);
  return unsafe("cudaStreamSynchronize");
}
API cudaError_t cudaStreamQuery(cudaStream_t s) {
  std::lock_guard<std::recursive_mutex> g(lock);
  if (auto c = of(s)->capture) { invalidate(c); return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery"); }
  return unsafe("cudaStreamQuery");
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { *e = (cudaEvent_t) new Event; return cudaSuccess; }
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { delete (Event*)e; return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) {
  std::lock_guard<std::recursive_mutex> g(lock);
  auto event = (Event*)e;
  event->recorded = true, event->ms = std::max(of(s)->ms, host_ms), event->capture = nullptr;
  Capture* c = of(s)->capture;
  if (!c) return cudaSuccess;
  if (c->status != cudaStreamCaptureStatusActive) return fail(cudaErrorStreamCaptureInvalidated, "cudaEventRecord");
  if (flags & cudaEventRecordExternal) {
    Node* node = nullptr;
    auto e = put(s, CU_GRAPH_NODE_TYPE_EVENT_RECORD, nullptr, &node);
    if (node) node->event = event;
    return e;
  }
  event->capture = c, event->capture_id = c->id, event->deps = c->at[of(s)];
  return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
static bool is_captured(Event* e) { return e->capture && !dead.count(e->capture_id); }
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  std::lock_guard<std::recursive_mutex> g(lock);
  if (((Event*)e)->capture) { if (is_captured((Event*)e)) invalidate(((Event*)e)->capture); return fail(cudaErrorCapturedEvent, "cudaEventQuery"); }
  return unsafe("cudaEventQuery");
}
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  std::lock_guard<std::recursive_mutex> g(lock);
  if (((Event*)e)->capture) { if (is_captured((Event*)e)) invalidate(((Event*)e)->capture); return fail(cudaErrorCapturedEvent, "cudaEventSynchronize"); }
  host_ms = std::max(host_ms, ((Event*)e)->ms);
  return unsafe("cudaEventSynchronize");
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) { *ms = (float)(((Event*)b)->ms - ((Event*)a)->ms); return cudaSuccess; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  std::lock_guard<std::recursive_mutex> g(lock);
  auto stream = of(s);
  auto event = (Event*)e;
  Capture* c = stream->capture;
  if (!event->recorded) return cudaSuccess;
  if (event->capture && !is_captured(event)) {
    if (c) { invalidate(c); return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent: an event of a capture that has ended"); }
    return fail(cudaErrorCapturedEvent, "cudaStreamWaitEvent: an event of a capture that has ended");
  }
  if (!event->capture) {
    if (c && !(flags & cudaEventWaitExternal)) { invalidate(c); return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent: an event from outside of the capture"); }
    if (c) return put(s, CU_GRAPH_NODE_TYPE_WAIT_EVENT, nullptr);
    stream->ms = std::max(stream->ms, event->ms);
    return cudaSuccess;
  }
  if (c && c != event->capture) { invalidate(c); invalidate(event->capture); return fail(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent"); }
  if (!c) {
    if (stream == &legacy) { invalidate(event->capture); return fail(cudaErrorStreamCaptureImplicit, "cudaStreamWaitEvent on the legacy stream"); }
    stream->capture = event->capture, event->capture->at[stream] = {};
  }
  event->capture->at[stream].insert(event->deps.begin(), event->deps.end());
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* x, unsigned) {
  if (auto c = of(s)->capture) { invalidate(c); return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamAddCallback"); }
  f(s, cudaSuccess, x);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void* x) { return put(s, CU_GRAPH_NODE_TYPE_HOST, [=] { f(x); }); }

// -- kernels
API void** __cudaRegisterFatBinary(void*) { return (void**)new void*; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API char __cudaInitModule(void**) { return 1; }
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::recursive_mutex> g(lock);
  names[host] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
thread_local struct { dim3 grid, block; size_t shared; cudaStream_t stream; } pushed;
API unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, CUstream_st* s) { pushed = {g, b, m, s}; return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* m, void* s) {
  *g = pushed.grid, *b = pushed.block, *m = pushed.shared, *(cudaStream_t*)s = pushed.stream;
  return cudaSuccess;
}
// kernels of ours that move memory: (source, target, count)
int host::copy_unit(const void* f) {
  auto n = names.find(f);
  return n != names.end() && !n->second.compare(0, 4, "copy") && n->second.size() < 7 ? atoi(n->second.c_str() + 4) : 0;
}
void host::keep_args(Node* node, void** args) {
  node->args.clear(), node->arg_pointers.clear();
  for (int i = 0; i < 3; i++) node->args.emplace_back((char*)args[i], (char*)args[i] + 8);
  for (auto& a : node->args) node->arg_pointers.push_back(a.data());
  node->kernel.kernelParams = node->arg_pointers.data();
}
void host::copy_words(Node* node, int unit) {
  uint64_t w[3];
  for (int i = 0; i < 3; i++) memcpy(&w[i], node->args[i].data(), 8);
  memmove((void*)w[1], (void*)w[0], w[2] * unit);
}
// a kernel that nobody computed, the last one; empty where all were
static std::string not_computed;
API const char* host_cuda_not_computed() {
  std::lock_guard<std::recursive_mutex> g(lock);
  thread_local std::string told;
  told.swap(not_computed);
  not_computed.clear();
  return told.c_str();
}
cudaError_t host::launch(const void* f, dim3 grid, dim3 b, void** args, size_t shared, cudaStream_t s) {
  if (is_loud) { auto n = names.find(f); fprintf(stderr, "cuda on host: %s on %p\n", n == names.end() ? "a kernel" : n->second.c_str(), (void*)s); }
  Node* node = nullptr;
  auto e = put(s, CU_GRAPH_NODE_TYPE_KERNEL, nullptr, &node);
  int unit;
  {
    std::lock_guard<std::recursive_mutex> g(lock);
    unit = copy_unit(f);
    auto name = names.count(f) ? names[f] : "a kernel without a name";
    if (!unit && name.find("spin_kernel") == std::string::npos) not_computed = name;  // (torch.cuda._sleep has nothing to compute)
  }
  if (!e && !node && unit) { Node once; keep_args(&once, args); copy_words(&once, unit); }
  if (node && unit) keep_args(node, args);
  if (node) {
    node->kernel.func = (CUfunction)f;
    node->kernel.gridDimX = grid.x, node->kernel.gridDimY = grid.y, node->kernel.gridDimZ = grid.z;
    node->kernel.blockDimX = b.x, node->kernel.blockDimY = b.y, node->kernel.blockDimZ = b.z, node->kernel.sharedMemBytes = (unsigned)shared;
    node->priority = of(s)->priority;
  }
  return e;
}
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) { *k = (cudaKernel_t)f; return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) { return launch(k, g, b, a, m, s); }
API cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) { return launch(f, g, b, a, m, s); }
API cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3 g, dim3 b, void** a, size_t m, cudaStream_t s) { return launch(f, g, b, a, m, s); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) { return launch(f, c->gridDim, c->blockDim, a, c->dynamicSmemBytes, c->stream); }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = 90, a->ptxVersion = 90, a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { *n = 2; return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { *n = 2; return cudaSuccess; }
