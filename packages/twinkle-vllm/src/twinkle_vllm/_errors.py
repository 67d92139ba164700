"""The errors of twinkle-vllm.

```
SamplerError
+-- AdapterNotLoaded (LookupError)     an adapter that this sampler does not hold
+-- AdapterRefused (ValueError)        an adapter that cannot be loaded
+-- EngineFailed (RuntimeError)        vLLM raised while it worked on the request
+-- EngineMissing (ImportError)        vLLM is not installed
+-- EngineSettingError (ValueError)    an engine argument or environment that cannot work
+-- IncompleteWeights (ValueError)     an update without some of the model's tensors
+-- ModelNotFound (FileNotFoundError)  no model at the path
+-- PromptError (ValueError)           an input that cannot be sampled from; the message names its index
+-- ReplicaLost (RuntimeError)         a replica of a pool died with the request
+-- SamplerPaused (RuntimeError)       a call that would wait for as long as the sampler is paused
+-- SamplingOptionError (ValueError)   an unknown sampling option, or one that cannot be honoured
+-- StaleRequest (RuntimeError)        a request whose weights had become too old
```

Each takes its message as its one argument and pickles, since it must cross process borders.
"""


class SamplerError(Exception):
    """Base of every error that twinkle-vllm raises itself."""


class AdapterNotLoaded(SamplerError, LookupError):
    """No adapter of that name is loaded in this sampler."""


class AdapterRefused(SamplerError, ValueError):
    """An adapter that cannot be loaded; what was loaded before stays."""


class EngineFailed(SamplerError, RuntimeError):
    """vLLM raised while it worked on the request; the message has its error."""


class EngineMissing(SamplerError, ImportError):
    """vLLM is not installed; the message has the install command."""


class EngineSettingError(SamplerError, ValueError):
    """An engine argument, a mesh or an environment variable with which the sampler cannot work."""


class IncompleteWeights(SamplerError, ValueError):
    """A weight update lacked tensors that the model has."""


class ModelNotFound(SamplerError, FileNotFoundError):
    """There is no model at that path."""


class PromptError(SamplerError, ValueError):
    """An input that cannot be sampled from; the message names its index."""


class ReplicaLost(SamplerError, RuntimeError):
    """A replica of a pool died with the request, and it was not to be tried again."""


class SamplerPaused(SamplerError, RuntimeError):
    """The call would wait for as long as the sampler is paused."""


class SamplingOptionError(SamplerError, ValueError):
    """A sampling option that does not exist, or that cannot be honoured."""


class StaleRequest(SamplerError, RuntimeError):
    """The request had begun with weights that became older than `max_staleness` allows."""
