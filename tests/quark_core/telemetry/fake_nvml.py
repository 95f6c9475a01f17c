"""A pynvml module that answers as it is told, where there is no GPU."""

import threading
import types


class NVMLError(Exception):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class FakeGpu:
    def __init__(self, index, **answers):
        self.index = index
        self.answers = {
            "name": f"Fake {index}",
            "uuid": f"GPU-{index}{index}{index}{index}-aaaa",
            "utilization": 10 * (index + 1),
            "memory": (2**30 * (index + 1), 2**34),
            "temperature": 40 + index,
            "power": 100_500 + index,
            "migs": [],
            **answers,
        }


class FakeNvml(types.ModuleType):
    """Put it into `sys.modules["pynvml"]`; an answer that is an exception is raised."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, gpus, init_error=None):
        super().__init__("pynvml")
        self.gpus = gpus
        self.init_error = init_error
        self.opened = self.closed = 0
        self.calls = 0
        self.hang = None
        self.hanging = threading.Event()

    def nvmlInit(self):
        self.calls += 1
        if self.init_error is not None:
            raise self.init_error
        self.opened += 1

    def nvmlShutdown(self):
        self.closed += 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        self.ask(self.gpus[index], "handle")
        return self.gpus[index]

    def ask(self, gpu, what):
        self.calls += 1
        if self.hang is not None:
            self.hanging.set()
            self.hang.wait(600)
        answer = gpu.answers.get(what)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def nvmlDeviceGetName(self, gpu):
        return self.ask(gpu, "name")

    def nvmlDeviceGetUUID(self, gpu):
        return gpu if isinstance(gpu, str) else self.ask(gpu, "uuid")

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return types.SimpleNamespace(gpu=self.ask(gpu, "utilization"), memory=1)

    def nvmlDeviceGetMemoryInfo(self, gpu):
        used, total = self.ask(gpu, "memory")
        return types.SimpleNamespace(used=used, total=total, free=total - used)

    def nvmlDeviceGetTemperature(self, gpu, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self.ask(gpu, "temperature")

    def nvmlDeviceGetPowerUsage(self, gpu):
        return self.ask(gpu, "power")

    def nvmlDeviceGetMigMode(self, gpu):
        return (1 if self.ask(gpu, "migs") else 0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, place):
        migs = self.ask(gpu, "migs")
        if place >= len(migs):
            raise NVMLError("Not Found")
        return migs[place]
