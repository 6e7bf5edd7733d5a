// Kernels of the tests of FFI libraries. `ffi_variant.cc` has the part that differs between libraries.
#include <cstdint>
#include <memory>
#include <string_view>

#include "xla/ffi/api/ffi.h"

extern const float kFactor;

namespace ffi = xla::ffi;

// The scaled array, and the sum of each of its rows.
static ffi::Error ScaleImpl(float scale, std::string_view sign, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y,
                            ffi::ResultBuffer<ffi::F32> sums) {
  if (sign != "plus" && sign != "minus") return ffi::Error::InvalidArgument("the sign is neither plus nor minus");
  float factor = (sign == "minus" ? -1 : 1) * scale * kFactor;
  size_t rows = sums->element_count();
  size_t columns = rows ? x.element_count() / rows : 0;
  for (size_t row = 0; row < rows; ++row) {
    float sum = 0;
    for (size_t column = 0; column < columns; ++column) {
      size_t at = row * columns + column;
      sum += y->typed_data()[at] = factor * x.typed_data()[at];
    }
    sums->typed_data()[row] = sum;
  }
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Scale, ScaleImpl,
                              ffi::Ffi::Bind()
                                  .Attr<float>("scale")
                                  .Attr<std::string_view>("sign")
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

// The number of calls of one executable, from `first` on: a state that the stage `instantiate` makes.
struct Count {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  int32_t next;
};
ffi::TypeId Count::id = {};
ffi::TypeInfo Count::info = ffi::MakeTypeInfo<Count>();
extern "C" void* CountId() { return &Count::id; }
extern "C" void* CountInfo() { return &Count::info; }

static ffi::ErrorOr<std::unique_ptr<Count>> NewCount(int32_t first) {
  return std::make_unique<Count>(Count{first});
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(CountInstantiate, NewCount, ffi::Ffi::BindInstantiate().Attr<int32_t>("first"));

static ffi::Error CountImpl(Count* count, ffi::ResultBuffer<ffi::S32> y) {
  y->typed_data()[0] = count->next++;
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(CountExecute, CountImpl,
                              ffi::Ffi::Bind().Ctx<ffi::State<Count>>().Ret<ffi::Buffer<ffi::S32>>());

static ffi::Error CrashImpl(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  *reinterpret_cast<volatile int*>(8) = 1;
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Crash, CrashImpl,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());

// A copy, or an error if the first element is negative.
static ffi::Error CheckImpl(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  if (x.typed_data()[0] < 0) return ffi::Error::InvalidArgument("the first element is negative");
  for (size_t at = 0; at < x.element_count(); ++at) y->typed_data()[at] = x.typed_data()[at];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Check, CheckImpl,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
