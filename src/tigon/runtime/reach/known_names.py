"""Names of functions, methods, attributes and packages whose use may have side effects or depend on hidden state.

`tigon.runtime.reach` looks these names up among the names that the code of a forward uses.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# These methods write to the container on which they are called.
MUTATORS = _words("""
    append extend insert remove pop popitem clear update setdefault add discard appendleft extendleft popleft
    rotate sort reverse subtract difference_update intersection_update symmetric_difference_update move_to_end
    __setitem__ __delitem__ __iadd__ __imul__ __ior__ __iand__ __isub__ __ixor__
""")
# These methods write to a module, to its parameters, or to the graph.
SETTERS = _words("""
    __setattr__ __delattr__ register_buffer register_parameter register_module add_module register_forward_hook
    register_forward_pre_hook register_full_backward_hook requires_grad_ register_hook
    register_post_accumulate_grad_hook retain_grad train eval zero_grad load_state_dict backward
""")
# Functions that read or write an attribute whose name is a string.
GETTERS = _words("getattr hasattr setattr delattr attrgetter")
# Code that uses one of these names may read any attribute of an object.
READERS = _words("""
    vars dir __dict__ __dir__ __getattribute__ __getattr__ __getstate__ __reduce__ __reduce_ex__
    _parameters _buffers _modules asdict astuple getmembers getattr_static
""")
# The functions of these packages depend on their arguments alone, as far as a forward can use them.
TRUSTED = _words("""
    torch builtins math cmath operator _operator functools _functools typing types typing_extensions collections
    _collections abc _abc enum contextlib dataclasses copy itertools inspect packaging triton
    tigon einops re importlib
""")
# The functions of these packages give another result at every call, or have an effect outside, such as a log entry.
IMPURE = _words("""
    random _random secrets time datetime uuid os posix sys io _io pathlib socket subprocess threading _thread
    queue _queue multiprocessing asyncio ctypes pickle shutil tempfile gc weakref atexit signal contextvars
    _contextvars logging warnings _warnings wandb mlflow tensorboard
""")
# These builtin functions have effects outside the call, run code that is not known, or give a number that depends on
# an address.
IMPURE_BUILTINS = _words("""
    print input open exec eval setattr delattr __import__ breakpoint globals locals id hash
""")
# These functions of torch write to a file, wait for the device, or change how torch computes from then on.
IMPURE_TORCH = _words("""
    save manual_seed seed set_default_dtype set_default_device set_default_tensor_type set_num_threads
    set_rng_state use_deterministic_algorithms set_float32_matmul_precision set_flush_denormal synchronize
    empty_cache
""")
# Constructing one of these contexts changes a mode at once. In a `with` statement the mode is restored.
MODE_SETTERS = _words("""
    set_grad_enabled set_multithreading_enabled set_detect_anomaly _force_original_view_tracking
""")
# These functions of `operator` write to their first argument.
WRITING_OPERATORS = _words("""
    setitem delitem iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor
    methodcaller
    __setitem__ __delitem__ __iadd__ __iand__ __iconcat__ __imul__ __ior__ __ipow__ __isub__ __ixor__
""")
# The result of these functions of torch depends on the mode, the process or the machine, which no probe changes.
MODES = _words("""
    is_grad_enabled is_autocast_enabled is_autocast_cpu_enabled get_autocast_dtype get_autocast_gpu_dtype
    get_autocast_cpu_dtype is_inference_mode_enabled get_default_dtype get_default_device is_available
    device_count current_device get_device_capability get_device_name get_rank get_world_size is_initialized
    initial_seed get_rng_state are_deterministic_algorithms_enabled get_num_threads get_float32_matmul_precision
    is_deterministic_algorithms_warn_only_enabled is_warn_always_enabled is_anomaly_enabled memory_allocated
    max_memory_allocated current_stream is_compiling is_dynamo_compiling is_exporting is_tracing is_scripting
    _is_tracing _get_tracing_state
""")
# These attributes of a tensor may differ between the probe's tensors on the CPU and the tensors of a real call.
FACTS_OF_TENSORS = _words("""
    is_cuda is_cpu is_mps is_xpu is_meta get_device is_leaf grad_fn grad is_inference data_ptr _version
    retains_grad output_nr stride is_contiguous storage_offset _base _is_view storage untyped_storage dim_order
    is_shared is_pinned _backward_hooks
""")
# With these functions and classes, code tells the symbols of a run with symbolic sizes from numbers, hides an error, or
# reads attributes whose names are texts.
EVASIONS = _words("""
    SymInt SymFloat SymBool statically_known_true statically_known_false guard_or_true guard_or_false
    definitely_true definitely_false has_static_value is_symbolic suppress ExitStack
    attrgetter methodcaller
""")

# The types of devices. Code that reads a device and contains one of these names decides by the device of its input.
DEVICES = _words("cuda cpu mps xpu meta npu hpu xla")

# Only comparisons, and only conversions to text, call these special methods.
COMPARISONS = _words("__eq__ __ne__ __lt__ __le__ __gt__ __ge__")
CONVERSIONS = _words("__str__ __format__ __repr__")
# No expression calls these special methods.
NEVER_CALLED = _words("""
    __init_subclass__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__ __deepcopy__ __del__
    __sizeof__ __class_getitem__ __subclasshook__ __getnewargs__ __getnewargs_ex__ __dir__
""")

# Code that uses only these names, and no subscripts and loops, cannot learn the size of a tensor.
WITHOUT_SIZES = _words("""
    torch nn functional F Tensor self super forward dtype float32 contiguous float to type_as pow square mean var sqrt
    rsqrt mul add div mul_ add_ relu silu gelu sigmoid tanh
""")
# Python's functions and methods that give no size, or that call a function of torch when they meet a tensor.
OF_PYTHON = _words("isinstance tuple __getitem__")
# The names of the functions of torch that arithmetic calls, where they differ from the names of methods.
ARITHMETIC = _words("neg sub sub_ div_ __rsub__ __rdiv__ __rpow__")
