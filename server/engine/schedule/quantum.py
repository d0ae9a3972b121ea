"""The length of a quantum: as many steps as fit in its time at the speed measured lately."""

QUANTUM_S = 0.050  # longest quantum, and longest prefill while no image decodes: cancellations act this late


class QuantumLength:
    """Learns the seconds of a step, without prefill, for each number of images in powers of two."""

    def __init__(self, stride: int, max_steps: int) -> None:
        """stride: steps that the engine runs in one go; a quantum has a multiple of them · max_steps: of a quantum."""
        self._stride, self._max_steps = stride, max_steps
        self._seconds: dict[int, float] = {}  # smoothed

    def steps(self, images: int) -> int:
        seconds = self._seconds.get(images.bit_length())
        if seconds is None:  # from the next smaller size, as if each image cost the same
            known = [size for size in self._seconds if size < images.bit_length()]
            if not known:
                return self._stride
            seconds = self._seconds[max(known)] * 2 ** (images.bit_length() - max(known))
        return max(self._stride, min(self._max_steps, int(QUANTUM_S / seconds)) // self._stride * self._stride)

    def learn(self, images: int, seconds: float) -> None:
        """One step of so many images took so many seconds."""
        before = self._seconds.get(images.bit_length(), seconds)
        self._seconds[images.bit_length()] = 0.7 * before + 0.3 * seconds
