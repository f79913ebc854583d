// Stream capture, and graphs.
#include "device.h"

API cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode mode) {
  std::lock_guard<std::recursive_mutex> g(lock);
  auto stream = of(s);
  if (stream == &legacy) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture on the legacy stream");
  if (stream->capture) return fail(cudaErrorIllegalState, "cudaStreamBeginCapture: it captures already");
  auto c = new Capture;
  c->id = ++num_captures, c->mode = mode, c->origin = stream, c->thread = me(), c->at[stream] = {};
  stream->capture = c;
  captures.insert(c);
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
  std::lock_guard<std::recursive_mutex> g(lock);
  *graph = nullptr;
  auto c = of(s)->capture;
  if (!c) return fail(cudaErrorIllegalState, "cudaStreamEndCapture: nothing is captured");
  if (c->origin != of(s)) { invalidate(c); return fail(cudaErrorStreamCaptureUnmatched, "cudaStreamEndCapture"); }
  bool is_joined = true;
  for (auto& [stream, at] : c->at) {
    for (auto node : at) { std::set<Node*> seen; is_joined &= stream == c->origin || reaches(c->at[c->origin], node, seen); }
    stream->capture = nullptr;
  }
  bool is_valid = c->status == cudaStreamCaptureStatusActive;
  captures.erase(c);
  dead.insert(c->id);
  if (!is_valid) return fail(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  if (!is_joined) return fail(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
  *graph = (cudaGraph_t)c->graph;
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, cudaStreamCaptureStatus* status) {
  std::lock_guard<std::recursive_mutex> g(lock);
  auto c = of(s)->capture;
  if (of(s) == &legacy)
    for (auto other : captures)
      for (auto& [stream, _] : other->at)
        if (!(stream->flags & cudaStreamNonBlocking)) return fail(cudaErrorStreamCaptureImplicit, "cudaStreamIsCapturing");
  *status = c ? c->status : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** deps, const cudaGraphEdgeData** edges, size_t* num) {
  std::lock_guard<std::recursive_mutex> g(lock);
  auto c = of(s)->capture;
  *status = c ? c->status : cudaStreamCaptureStatusNone;
  if (!c) return cudaSuccess;
  if (id) *id = c->id;
  if (graph) *graph = (cudaGraph_t)c->graph;
  thread_local std::vector<cudaGraphNode_t> kept;
  kept.clear();
  for (auto n : c->at[of(s)]) kept.push_back((cudaGraphNode_t)n);
  if (deps) *deps = kept.data();
  if (edges) *edges = nullptr;
  if (num) *num = kept.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t graph, unsigned long long) {
  std::lock_guard<std::recursive_mutex> g(lock);
  auto exec = new Exec;
  std::vector<Node*> order;
  std::set<Node*> done;
  std::function<void(Node*)> visit = [&](Node* n) {
    if (!done.insert(n).second) return;
    for (auto& m : ((Graph*)graph)->nodes) if (n->deps.count(m.get())) visit(m.get());
    order.push_back(n);
  };
  for (auto& n : ((Graph*)graph)->nodes) visit(n.get());
  for (auto n : order) {
    auto copy = std::make_shared<Node>();
    copy->type = n->type, copy->run = n->run, copy->kernel = n->kernel, copy->deps = n->deps, copy->event = n->event;
    if (int unit = copy_unit((void*)n->kernel.func)) {
      Node* own = copy.get();
      keep_args(own, n->kernel.kernelParams);
      own->run = [own, unit] { copy_words(own, unit); };
    }
    exec->nodes.push_back({n, copy});
  }
  *e = (cudaGraphExec_t)exec;
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) {
  auto exec = (Exec*)e;
  return put(s, CU_GRAPH_NODE_TYPE_GRAPH, [=] {
    std::map<Node*, double> done;
    double begin = std::max(of(s)->ms, host_ms), end = begin;
    for (auto& [node, own] : exec->nodes) {
      double at = begin;
      for (auto before : own->deps) at = std::max(at, done[before]);
      bool takes_time = own->type == CU_GRAPH_NODE_TYPE_KERNEL || own->type == CU_GRAPH_NODE_TYPE_MEMCPY || own->type == CU_GRAPH_NODE_TYPE_MEMSET;
      done[node] = at + (takes_time ? KERNEL_MS : 0);
      end = std::max(end, done[node]);
      if (own->event) own->event->ms = done[node];
      if (own->run) own->run();
    }
    of(s)->ms = end;
  });
}
// Graphs stay until the process ends: what was instantiated from one looks at its nodes.
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return fail(cudaErrorNotSupported, "cudaGraphDebugDotPrint"); }
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* n) {
  auto& all = ((Graph*)graph)->nodes;
  if (nodes) for (size_t i = 0; i < *n && i < all.size(); i++) nodes[i] = (cudaGraphNode_t)all[i].get();
  *n = all.size();
  return cudaSuccess;
}
API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t* nodes, cudaGraphEdgeData* edges, size_t* n) {
  return (cudaError_t)cuGraphNodeGetDependencies((CUgraphNode)node, (CUgraphNode*)nodes, (CUgraphEdgeData*)edges, n);
}
