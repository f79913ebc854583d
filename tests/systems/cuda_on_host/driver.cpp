// What Triton calls, and cuda-bindings.
#include "device.h"
#include <elf.h>
#include <fstream>
#include <iterator>

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* v) { *v = 13000; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* d, int) { *d = 0; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* n) { *n = 1; return CUDA_SUCCESS; }
API CUresult cuDeviceGetName(char* name, int n, CUdevice) { snprintf(name, n, "%s", device_name); return CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) { *v = attribute(a); return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext* c) { *c = (CUcontext)&legacy; return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* d) { *d = 0; return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* v, CUlimit) { *v = 1024; return CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) { *c = (CUcontext)&legacy; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0, *active = 1; return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult e, const char** s) { *s = cudaGetErrorName((cudaError_t)e); return CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult e, const char** s) { *s = cudaGetErrorName((cudaError_t)e); return CUDA_SUCCESS; }
// a kernel's registers, and what it has of local memory: Inductor chooses by them
struct Figures { int registers = 32, local = 0; };
struct Module { std::map<std::string, Figures> kernels; };
static std::map<CUfunction, Figures> figures;
// machine code (ELF): the note .nv.info has a record (4, what, size; symbol, number) per figure and kernel
static Module* read_module(const char* image) {
  auto found = new Module;
  auto head = (const Elf64_Ehdr*)image;
  if (memcmp(image, ELFMAG, SELFMAG)) return found;
  auto sections = (const Elf64_Shdr*)(image + head->e_shoff);
  auto names_at = image + sections[head->e_shstrndx].sh_offset;
  const Elf64_Shdr *info = nullptr, *symbols = nullptr;
  for (int i = 0; i < head->e_shnum; i++) {
    if (!strcmp(names_at + sections[i].sh_name, ".nv.info")) info = &sections[i];
    if (sections[i].sh_type == SHT_SYMTAB) symbols = &sections[i];
  }
  if (!info || !symbols) return found;
  auto symbol = (const Elf64_Sym*)(image + symbols->sh_offset);
  auto texts = image + sections[symbols->sh_link].sh_offset;
  auto data = (const unsigned char*)image + info->sh_offset, end = data + info->sh_size;
  while (data + 4 <= end) {
    unsigned short size = 0;
    memcpy(&size, data + 2, 2);
    if (data[0] != 4) { data += 4; continue; }
    if (size == 8) {
      unsigned pair[2];
      memcpy(pair, data + 4, 8);
      auto& kernel = found->kernels[texts + symbol[pair[0]].st_name];
      if (data[1] == 0x2f) kernel.registers = pair[1];
      if (data[1] == 0x11) kernel.local = pair[1];
    }
    data += 4 + size;
  }
  return found;
}
API CUresult cuModuleLoadData(CUmodule* m, const void* image) { *m = (CUmodule)read_module((const char*)image); return CUDA_SUCCESS; }
API CUresult cuModuleLoadDataEx(CUmodule* m, const void* image, unsigned, CUjit_option*, void**) { return cuModuleLoadData(m, image); }
API CUresult cuModuleLoad(CUmodule* m, const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string image((std::istreambuf_iterator<char>(file)), {});
  if (image.size() < sizeof(Elf64_Ehdr)) return CUDA_ERROR_FILE_NOT_FOUND;
  return cuModuleLoadData(m, image.data());
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
API CUresult cuModuleGetFunction(CUfunction* f, CUmodule m, const char* name) {
  std::lock_guard<std::recursive_mutex> g(lock);
  *f = (CUfunction) new char;
  if (auto found = ((Module*)m)->kernels.find(name); found != ((Module*)m)->kernels.end()) figures[*f] = found->second;
  names[*f] = name;
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction f) {
  std::lock_guard<std::recursive_mutex> g(lock);
  auto found = figures.find(f);
  auto its = found == figures.end() ? Figures() : found->second;
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? its.registers : a == CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES ? its.local : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) { *n = 16; return CUDA_SUCCESS; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) { *n = 2; return CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void* v, CUpointer_attribute a, CUdeviceptr p) {
  std::lock_guard<std::recursive_mutex> g(lock);
  auto found = block((void*)p);
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)v = p;
  else if (a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned*)v = found->second.second == cudaMemoryTypeHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  else return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned m, CUstream s, void** a, void**) {
  return (CUresult)launch(f, dim3{gx, gy, gz}, dim3{bx, by, bz}, a, m, (cudaStream_t)s);
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** a, void**) {
  return (CUresult)launch(f, dim3{c->gridDimX, c->gridDimY, c->gridDimZ}, dim3{c->blockDimX, c->blockDimY, c->blockDimZ}, a, c->sharedMemBytes, (cudaStream_t)c->hStream);
}
API CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream s) { return (CUresult)cudaMemsetAsync((void*)p, v, n, (cudaStream_t)s); }
API CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus* status) { return (CUresult)cudaStreamIsCapturing((cudaStream_t)s, (cudaStreamCaptureStatus*)status); }
API CUresult cuStreamSynchronize(CUstream s) { return (CUresult)cudaStreamSynchronize((cudaStream_t)s); }
API CUresult cuCtxSynchronize() { return (CUresult)cudaDeviceSynchronize(); }
API CUresult cuGraphGetNodes(CUgraph g, CUgraphNode* nodes, size_t* n) { return (CUresult)cudaGraphGetNodes((cudaGraph_t)g, (cudaGraphNode_t*)nodes, n); }
API CUresult cuGraphNodeGetType(CUgraphNode n, CUgraphNodeType* t) { *t = (CUgraphNodeType)((Node*)n)->type; return CUDA_SUCCESS; }
API CUresult cuGraphKernelNodeGetParams(CUgraphNode n, CUDA_KERNEL_NODE_PARAMS* p) { *p = ((Node*)n)->kernel; return CUDA_SUCCESS; }
API CUresult cuGraphMemsetNodeGetParams(CUgraphNode n, CUDA_MEMSET_NODE_PARAMS* p) { *p = ((Node*)n)->memset_; return CUDA_SUCCESS; }
API CUresult cuGraphKernelNodeGetAttribute(CUgraphNode n, CUkernelNodeAttrID a, CUkernelNodeAttrValue* v) { memset(v, 0, sizeof *v); if (a == CU_LAUNCH_ATTRIBUTE_PRIORITY) v->priority = ((Node*)n)->priority; return CUDA_SUCCESS; }
API CUresult cuGraphKernelNodeSetAttribute(CUgraphNode n, CUkernelNodeAttrID a, const CUkernelNodeAttrValue* v) { if (a == CU_LAUNCH_ATTRIBUTE_PRIORITY) ((Node*)n)->priority = v->priority; return CUDA_SUCCESS; }
API CUresult cuGraphAddKernelNode(CUgraphNode* made, CUgraph graph, const CUgraphNode* deps, size_t num, const CUDA_KERNEL_NODE_PARAMS* p) {
  std::lock_guard<std::recursive_mutex> g(lock);
  auto node = std::make_unique<Node>();
  node->type = CU_GRAPH_NODE_TYPE_KERNEL, node->kernel = *p, node->graph = (Graph*)graph;
  if (auto found = runs.find((void*)p->func); found != runs.end()) node->run = found->second;
  for (size_t i = 0; i < num; i++) node->deps.insert((Node*)deps[i]);
  *made = (CUgraphNode)node.get();
  ((Graph*)graph)->nodes.push_back(std::move(node));
  return CUDA_SUCCESS;
}
API CUresult cuGraphAddDependencies(CUgraph, const CUgraphNode* from, const CUgraphNode* to, const CUgraphEdgeData*, size_t num) {
  std::lock_guard<std::recursive_mutex> g(lock);
  for (size_t i = 0; i < num; i++) ((Node*)to[i])->deps.insert((Node*)from[i]);
  return CUDA_SUCCESS;
}
API CUresult cuGraphDestroyNode(CUgraphNode n) {
  std::lock_guard<std::recursive_mutex> g(lock);
  auto node = (Node*)n;
  auto& all = node->graph->nodes;
  for (auto& other : all) other->deps.erase(node);
  for (auto i = all.begin(); i != all.end(); ++i) if (i->get() == node) { i->release(); all.erase(i); break; }
  return CUDA_SUCCESS;
}
API CUresult cuGraphExecKernelNodeSetParams(CUgraphExec e, CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS* p) {
  for (auto& [node, own] : ((Exec*)e)->nodes) if (node == (Node*)n) { own->kernel = *p; if (copy_unit((void*)p->func)) keep_args(own.get(), p->kernelParams); return CUDA_SUCCESS; }
  return CUDA_ERROR_INVALID_VALUE;
}
struct Share { int sms; };
API CUresult cuDeviceGetDevResource(CUdevice, CUdevResource* r, CUdevResourceType t) { memset(r, 0, sizeof *r); r->type = t; r->sm.smCount = 132; return CUDA_SUCCESS; }
API CUresult cuDevSmResourceSplitByCount(CUdevResource* result, unsigned* n, const CUdevResource* in, CUdevResource* left, unsigned, unsigned min) {
  unsigned each = (min + 7) / 8 * 8, can = each ? in->sm.smCount / each : 0;
  if (!result) { *n = can; return CUDA_SUCCESS; }
  *n = *n < can ? *n : can;
  for (unsigned i = 0; i < *n; i++) { result[i] = *in; result[i].sm.smCount = each; }
  if (left) { *left = *in; left->sm.smCount = in->sm.smCount - *n * each; }
  return CUDA_SUCCESS;
}
API CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* d, CUdevResource* r, unsigned) { *d = (CUdevResourceDesc) new Share{(int)r->sm.smCount}; return CUDA_SUCCESS; }
API CUresult cuGreenCtxCreate(CUgreenCtx* c, CUdevResourceDesc d, CUdevice, unsigned) { *c = (CUgreenCtx)d; return CUDA_SUCCESS; }
API CUresult cuGreenCtxStreamCreate(CUstream* s, CUgreenCtx, unsigned flags, int priority) { return (CUresult)cudaStreamCreateWithPriority((cudaStream_t*)s, flags, priority); }
API CUresult cuGetProcAddress_v2(const char* symbol, void** f, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  static void* self = [] { Dl_info info; dladdr((void*)&cuInit, &info); return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD); }();
  *f = !strcmp(symbol, "cuGetProcAddress") ? (void*)&cuGetProcAddress_v2 : dlsym(self, symbol);
  if (!*f) *f = dlsym(self, (std::string(symbol) + "_v2").c_str());
  if (found) *found = *f ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *f ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
  auto e = cuGetProcAddress_v2(symbol, f, 0, 0, nullptr);
  if (found) *found = e ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// a kernel that somebody else computes, on the host
API int host_cuda_launch(void (*f)(void*), void* x, void* stream) {
  Node* node = nullptr;
  auto e = put((cudaStream_t)stream, CU_GRAPH_NODE_TYPE_KERNEL, [=] { f(x); }, &node);
  if (node) {
    node->kernel.func = (CUfunction) new char, node->kernel.gridDimX = node->kernel.blockDimX = 1, node->priority = of((cudaStream_t)stream)->priority;
    runs[(void*)node->kernel.func] = node->run;
  }
  return e;
}
static CUresult neighbours(std::vector<Node*> found, CUgraphNode* nodes, CUgraphEdgeData* edges, size_t* n) {
  if (nodes) for (size_t i = 0; i < *n && i < found.size(); i++) { nodes[i] = (CUgraphNode)found[i]; if (edges) memset(&edges[i], 0, sizeof *edges); }
  *n = found.size();
  return CUDA_SUCCESS;
}
API CUresult cuGraphNodeGetDependencies(CUgraphNode n, CUgraphNode* nodes, CUgraphEdgeData* edges, size_t* num) {
  auto& deps = ((Node*)n)->deps;
  return neighbours({deps.begin(), deps.end()}, nodes, edges, num);
}
API CUresult cuGraphNodeGetDependentNodes(CUgraphNode n, CUgraphNode* nodes, CUgraphEdgeData* edges, size_t* num) {
  std::vector<Node*> found;
  for (auto& other : ((Node*)n)->graph->nodes) if (other->deps.count((Node*)n)) found.push_back(other.get());
  return neighbours(found, nodes, edges, num);
}
API int host_cuda_is_capturing(void* stream) { std::lock_guard<std::recursive_mutex> g(lock); return of((cudaStream_t)stream)->capture != nullptr; }
