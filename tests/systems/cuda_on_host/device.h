// CUDA's runtime, driver and cuBLAS on a machine without a GPU, for tests: device memory is the host's.
//
// Real: memory and its addresses, streams, events, the rules of stream capture (what may not be captured, what was not joined), graphs,
// their nodes and edges, copies and memsets. Not: time, and that anything runs at once. A kernel runs where it is launched, before the
// launch returns, one at a time; what it computes is told by `kernels.py`, and nothing where nobody told.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace host {
struct Graph;
struct Event;
struct Node {
  int type;  // CU_GRAPH_NODE_TYPE_*
  std::set<Node*> deps;
  std::function<void()> run;
  CUDA_KERNEL_NODE_PARAMS kernel{};
  std::vector<std::vector<char>> args;
  std::vector<void*> arg_pointers;
  CUDA_MEMSET_NODE_PARAMS memset_{};
  int priority = 0;
  Graph* graph = nullptr;
  Event* event = nullptr;  // that it records
};
struct Graph {
  std::vector<std::unique_ptr<Node>> nodes;
};
struct Exec {
  std::vector<std::pair<Node*, std::shared_ptr<Node>>> nodes;  // of the graph, and as instantiated, dependencies first
};
struct Stream;
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
  Stream* origin;
  Graph* graph = new Graph;
  std::map<Stream*, std::set<Node*>> at;
  unsigned long thread;
};
struct Stream {
  double ms = 0;  // when all that it has will be done
  int priority = 0;
  unsigned flags = 0;
  Capture* capture = nullptr;
};
struct Event {
  bool recorded = false;
  double ms = 0;
  Capture* capture = nullptr;
  unsigned long long capture_id = 0;
  std::set<Node*> deps;
};
inline std::recursive_mutex lock, device;
inline Stream legacy;
inline std::set<Stream*> streams{&legacy};
inline std::set<Capture*> captures;
inline std::set<unsigned long long> dead;
inline unsigned long long num_captures = 0;
inline thread_local cudaError_t last = cudaSuccess;
inline thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
inline thread_local int thread_tag;
inline std::map<char*, std::pair<size_t, int>> memory;  // address -> (bytes, cudaMemoryType)
inline size_t held = 0;
const size_t TOTAL = (size_t)139 << 30;
inline const char* device_name = getenv("CUDA_ON_HOST_NAME") ? getenv("CUDA_ON_HOST_NAME") : "CUDA on the host (an H200's figures)";
inline std::unordered_map<const void*, std::string> names;
inline std::unordered_map<void*, std::function<void()>> runs;  // what kernels do that are computed on the host
inline bool is_loud = getenv("CUDA_ON_HOST_LOG") != nullptr;

// The clock is made up: a kernel, a copy and a memset take as long as each other, and streams wait for nothing but events. So what has
// the shorter chain of kernels is the faster.
const double KERNEL_MS = 0.01;
inline double host_ms = 0;  // what the host has waited for
inline cudaError_t fail(cudaError_t e, const char* where) {
  last = e;
  if (is_loud) fprintf(stderr, "cuda on host: %s: %s\n", where, cudaGetErrorName(e));
  return e;
}
inline Stream* of(cudaStream_t s) { return (uintptr_t)s <= 2 ? &legacy : (Stream*)s; }
inline unsigned long me() { return (unsigned long)&thread_tag; }
inline void invalidate(Capture* c) { c->status = cudaStreamCaptureStatusInvalidated; }

// calls that are not allowed while somebody captures
inline cudaError_t unsafe(const char* where) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (auto c : captures)
    if (c->mode == cudaStreamCaptureModeGlobal || (c->mode == cudaStreamCaptureModeThreadLocal && c->thread == me())) {
      invalidate(c);
      return fail(cudaErrorStreamCaptureUnsupported, where);
    }
  return cudaSuccess;
}
inline cudaError_t put(cudaStream_t s, int type, std::function<void()> run, Node** made = nullptr) {
  {
    std::lock_guard<std::recursive_mutex> g(lock);
    Stream* stream = of(s);
    if (Capture* c = stream->capture) {
      if (c->status != cudaStreamCaptureStatusActive) return fail(cudaErrorStreamCaptureInvalidated, "launch");
      auto node = std::make_unique<Node>();
      node->type = type, node->run = run, node->deps = c->at[stream], node->graph = c->graph;
      if (made) *made = node.get();
      c->at[stream] = {node.get()};
      c->graph->nodes.push_back(std::move(node));
      return cudaSuccess;
    }
    if (stream == &legacy)
      for (auto c : captures)
        for (auto& [other, _] : c->at)
          if (!(other->flags & cudaStreamNonBlocking)) { invalidate(c); return fail(cudaErrorStreamCaptureImplicit, "launch on the legacy stream"); }
  }
  if (type != CU_GRAPH_NODE_TYPE_GRAPH) {
    std::lock_guard<std::recursive_mutex> g(lock);
    of(s)->ms = std::max(of(s)->ms, host_ms) + KERNEL_MS;
  }
  if (!run) return cudaSuccess;
  std::lock_guard<std::recursive_mutex> g(device);  // one kernel at a time. Not the other lock: this one may wait for Python's
  run();
  return cudaSuccess;
}
inline bool reaches(const std::set<Node*>& from, Node* node, std::set<Node*>& seen) {
  for (auto n : from)
    if (n == node || (seen.insert(n).second && reaches(n->deps, node, seen))) return true;
  return false;
}
inline cudaError_t allocate(void** p, size_t n, int type) {
  std::lock_guard<std::recursive_mutex> g(lock);
  if (type == cudaMemoryTypeDevice && held + n > TOTAL) return fail(cudaErrorMemoryAllocation, "cudaMalloc");
  size_t size = (n + 4095) / 4096 * 4096;
  *p = aligned_alloc(n >= (2 << 20) ? 2 << 20 : 4096, n >= (2 << 20) ? (n + (2 << 20) - 1) / (2 << 20) * (2 << 20) : size ? size : 4096);
  if (!*p) return fail(cudaErrorMemoryAllocation, "malloc");
  memory[(char*)*p] = {n, type};
  if (type == cudaMemoryTypeDevice) held += n;
  return cudaSuccess;
}
inline cudaError_t release(void* p) {
  std::lock_guard<std::recursive_mutex> g(lock);
  if (!p) return cudaSuccess;
  auto found = memory.find((char*)p);
  if (found == memory.end()) return fail(cudaErrorInvalidValue, "cudaFree");
  if (found->second.second == cudaMemoryTypeDevice) held -= found->second.first;
  memory.erase(found);
  free(p);
  return cudaSuccess;
}
inline std::pair<char* const, std::pair<size_t, int>>* block(const void* p) {
  auto found = memory.upper_bound((char*)p);
  if (found == memory.begin()) return nullptr;
  --found;
  return (char*)p < found->first + found->second.first ? &*found : nullptr;
}
inline int attribute(int a) {
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6016;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrL2CacheSize: return 62914560;
    case cudaDevAttrMaxPitch: return 2147483647;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrAsyncEngineCount: return 3;
    default: return 0;
  }
}
int copy_unit(const void* kernel);
void keep_args(Node* node, void** args);
void copy_words(Node* node, int unit);
cudaError_t launch(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t s);
}  // namespace host
using namespace host;
