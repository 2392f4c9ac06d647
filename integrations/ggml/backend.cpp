// A backend of ggml that computes GGML_OP_FLASH_ATTN_EXT with fulgur on the CPU: one device of type
// ACCEL on buffers of host memory, as ggml's scheduler wants it to take an operation from the CPU
// backend. Nothing here throws or aborts: what goes wrong is in ggml's log.
#include <cstring>
#include <mutex>
#include <new>
#include <set>
#include <string>

#include "attention.h"
#include "fulgur/fulgur.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"

namespace {

constexpr char kName[] = "fulgur";
constexpr int kMaxThreads = 1024;  // of fulgur

/// Writes a line to ggml's log.
void log(ggml_log_level level, const std::string& text) {
  ggml_log_callback callback = nullptr;
  void* user_data = nullptr;
  ggml_log_get(&callback, &user_data);
  if (callback != nullptr)
    callback(level, (std::string(kName) + ": " + text + "\n").c_str(), user_data);
}

/// What a stream of operations keeps.
struct Context {
  int threads = 0;  // 0: all cores, until ggml says how many
};

Context& context_of(ggml_backend_t backend) { return *static_cast<Context*>(backend->context); }

/// Whether an operation only names memory.
bool is_view(const ggml_tensor* op) {
  switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
      return true;
    default:
      return false;
  }
}

// A backend: what computes the parts of graphs that the scheduler gives to the device.

const char* backend_name(ggml_backend_t) { return kName; }

void free_backend(ggml_backend_t backend) {
  delete &context_of(backend);
  delete backend;
}

void set_threads(ggml_backend_t backend, int threads) {
  context_of(backend).threads = threads < 1 ? 0 : threads < kMaxThreads ? threads : kMaxThreads;
}

ggml_status compute_node(const Context& context, const ggml_tensor* op) {
  if (is_view(op) || ggml_is_empty(op)) return GGML_STATUS_SUCCESS;
  try {
    const char* const why_not = op->op == GGML_OP_FLASH_ATTN_EXT
                                    ? fulgur_ggml::why_not(*op)
                                    : "only FLASH_ATTN_EXT is computed";
    if (why_not == nullptr) {
      fulgur_ggml::compute(*op, context.threads);
      return GGML_STATUS_SUCCESS;
    }
    log(GGML_LOG_LEVEL_ERROR, std::string(ggml_op_desc(op)) + " of '" + op->name + "': " + why_not);
  } catch (const std::bad_alloc&) {
    return GGML_STATUS_ALLOC_FAILED;
  } catch (const fulgur::Error& error) {
    log(GGML_LOG_LEVEL_ERROR,
        std::string(ggml_op_desc(op)) + " of '" + op->name + "': " + error.what());
    if (error.status() == fulgur::Status::kOutOfMemory) return GGML_STATUS_ALLOC_FAILED;
  } catch (const std::exception& error) {
    log(GGML_LOG_LEVEL_ERROR, error.what());
  }
  return GGML_STATUS_FAILED;
}

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph* graph) try {
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    const ggml_status status = compute_node(context_of(backend), ggml_graph_node(graph, i));
    if (status != GGML_STATUS_SUCCESS) return status;
  }
  return GGML_STATUS_SUCCESS;
} catch (const std::exception&) {  // there was no memory to say what went wrong
  return GGML_STATUS_ALLOC_FAILED;
}

// The device.

const char* device_name(ggml_backend_dev_t) { return kName; }

const char* device_description(ggml_backend_dev_t) {
  static const std::string kDescription = "exact attention, " + fulgur_ggml::kernel();
  return kDescription.c_str();
}

void device_memory(ggml_backend_dev_t, size_t* free, size_t* total) { *free = *total = 0; }

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
  return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void device_properties(ggml_backend_dev_t device, ggml_backend_dev_props* properties) {
  *properties = {};
  properties->name = device_name(device);
  properties->description = device_description(device);
  properties->type = device_type(device);
  properties->caps.buffer_from_host_ptr = true;
}

ggml_backend_t new_backend(ggml_backend_dev_t device, const char*) {
  static ggml_guid guid = {0x66, 0x75, 0x6c, 0x67, 0x75, 0x72, 0x4f, 0x1a,
                           0x9b, 0x3e, 0x52, 0x07, 0xc4, 0x8d, 0x21, 0x5b};
  ggml_backend_i calls = {};
  calls.get_name = backend_name;
  calls.free = free_backend;
  calls.graph_compute = compute_graph;
  auto* const context = new (std::nothrow) Context;
  if (context == nullptr) return nullptr;
  auto* const backend = new (std::nothrow) ggml_backend{&guid, calls, device, context};
  if (backend == nullptr) delete context;
  return backend;
}

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t) {
  return ggml_backend_cpu_buffer_type();
}

ggml_backend_buffer_t buffer_of(ggml_backend_dev_t, void* data, size_t bytes, size_t) {
  return ggml_backend_cpu_buffer_from_ptr(data, bytes);
}

/// Says once of each reason why attention stays with other backends.
void say_why_not(const char* reason) try {
  static std::mutex mutex;
  static std::set<const char*> said;
  const std::lock_guard lock(mutex);
  if (!said.insert(reason).second) return;
  log(GGML_LOG_LEVEL_INFO,
      std::string("leaves a FLASH_ATTN_EXT to other backends, as it computes only where ") +
          reason);
} catch (const std::exception&) {  // nothing depends on it
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor* op) {
  if (is_view(op)) return true;
  if (op->op != GGML_OP_FLASH_ATTN_EXT) return false;
  const char* const reason = fulgur_ggml::why_not(*op);
  if (reason != nullptr) say_why_not(reason);
  return reason == nullptr;
}

bool supports_buffer(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  return ggml_backend_buft_is_host(type);
}

// The registry.

const char* registry_name(ggml_backend_reg_t) { return kName; }

size_t device_count(ggml_backend_reg_t) { return 1; }

ggml_backend_dev_t device_at(ggml_backend_reg_t reg, size_t) {
  static ggml_backend_device device = [&] {
    ggml_backend_device_i calls = {};
    calls.get_name = device_name;
    calls.get_description = device_description;
    calls.get_memory = device_memory;
    calls.get_type = device_type;
    calls.get_props = device_properties;
    calls.init_backend = new_backend;
    calls.get_buffer_type = buffer_type;
    calls.buffer_from_host_ptr = buffer_of;
    calls.supports_op = supports_op;
    calls.supports_buft = supports_buffer;
    return ggml_backend_device{calls, reg, nullptr};
  }();
  return &device;
}

void* function_at(ggml_backend_reg_t, const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") != 0) return nullptr;
  return reinterpret_cast<void*>(set_threads);
}

ggml_backend_reg_t registry() {
  static ggml_backend_reg reg = {
      GGML_BACKEND_API_VERSION, {registry_name, device_count, device_at, function_at}, nullptr};
  return &reg;
}

/// Whether the machine is one that fulgur computes on, as 0 or 1.
int score() { return fulgur_ggml::kernel().empty() ? 0 : 1; }

}  // namespace

GGML_BACKEND_DL_IMPL(registry)
GGML_BACKEND_DL_SCORE_IMPL(score)
