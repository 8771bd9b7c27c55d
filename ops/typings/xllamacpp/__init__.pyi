# The part of xllamacpp that this project calls; the wheel is compiled and ships no types.

class llama_flash_attn_type:  # noqa: N801 - The wheel's own name.
    LLAMA_FLASH_ATTN_TYPE_AUTO: int
    LLAMA_FLASH_ATTN_TYPE_DISABLED: int
    LLAMA_FLASH_ATTN_TYPE_ENABLED: int

class CommonParamsModel:
    path: str

class CpuParams:
    n_threads: int

class CommonParams:
    model: CommonParamsModel
    model_alias: set[str]
    hostnames: list[str]
    port: int
    api_keys: list[str]
    n_ctx: int
    n_parallel: int
    n_batch: int
    n_ubatch: int
    n_predict: int
    n_threads_http: int
    n_gpu_layers: int
    cpuparams: CpuParams
    cpuparams_batch: CpuParams
    cache_prompt: bool
    cache_ram_mib: int
    cont_batching: bool
    embedding: bool
    kv_unified: bool
    flash_attn_type: int
    slot_prompt_similarity: float
    endpoint_metrics: bool
    endpoint_props: bool
    endpoint_slots: bool
    timeout_read: int
    timeout_write: int
    ui: bool
    verbosity: int
    warmup: bool
    def __init__(self) -> None: ...

class Server:
    def __init__(self, params: CommonParams) -> None: ...
    @property
    def listening_address(self) -> str: ...
