"""Speech to learn from: sentences of a small grammar, spoken by espeak-ng, as mel filterbanks and
phonemes.
"""

import math
import re
import subprocess
import tempfile
import wave
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from shutil import which

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

BANDS = 40  # mel bands, as in the paper
# samples a second of espeak-ng; 25 ms and 10 ms of them
RATE, WINDOW, HOP, FOURIER = 22_050, 551, 220, 1_024
VOICES = (
    "m1",
    "m2",
    "m3",
    "m4",
    "m6",
    "m7",
    "f1",
    "f2",
    "f4",
    "f5",
    "Andy",
    "Annie",
    "belinda",
    "edward",
    "steph",
    "john",
)  # variants of espeak-ng's voice en-us
OTHER_VOICES = ("m5", "f3", "Michael", "linda")  # not trained on
_WORDS = {
    "who": (
        "mother,father,teacher,doctor,farmer,sister,brother,sailor,baker,child,stranger,queen,king,"
        "neighbour,judge,cousin,nurse,thief,guest,boy,girl"
    ),
    "what": (
        "apple,bridge,candle,chair,church,cheese,dog,engine,feather,fish,flower,forest,glass,hat,"
        "horse,house,jacket,kitchen,lamp,mountain,mouse,needle,orange,ocean,page,picture,river,"
        "road,sheep,shoe,stone,table,tower,tree,village,violin,wheel,window,yard,zebra,toy,book,"
        "cloud,path,journey,treasure,bath,cage,beach"
    ),
    "how": (
        "old,young,tiny,huge,quiet,angry,yellow,purple,green,gentle,clever,brave,rough,smooth,"
        "thick,thin,early,foreign,golden,heavy,empty,narrow,perfect,simple,usual,weak,wise,bright,"
        "curious,cheap"
    ),
    "did": (
        "saw,heard,took,found,bought,carried,watched,painted,chose,forgot,measured,followed,"
        "reached,showed,lost,pushed,raised,shook,touched,joined,noticed,visited,washed,enjoyed,"
        "voted for,thought of,laughed at"
    ),
    "where": "near,under,over,behind,beside,above,across,around,through,beyond,without,against",
    "when": (
        "today,yesterday,on Thursday,in August,every evening,once again,last year,at noon,too"
        " often,as usual"
    ),
    "whose": "the,a,his,her,my,their,our,your,this,every,another,the other",
    "and": "and,but,because,while,although,so,until,when",
}
WORDS = {kind: words.split(",") for kind, words in _WORDS.items()}
PATTERNS = (
    "whose who did whose what",
    "whose how who did whose what when",
    "whose who did whose how what",
    "whose what where whose how what did whose who",
    "when whose who did whose what where whose what",
    "whose how what did whose how who where whose what",
)
Utterance = tuple[Tensor, list[str]]  # (frames, BANDS) float16, phonemes


def sentence(draws: np.random.Generator) -> str:
    """One to three clauses, such as `the old sailor saw a bridge but every king forgot my hat`."""
    clauses = [PATTERNS[draws.integers(len(PATTERNS))] for _ in range(draws.integers(1, 4))]
    choices = [WORDS[kind] for kind in " and ".join(clauses).split()]
    return " ".join(words[draws.integers(len(words))] for words in choices)


def espeak() -> str:
    """The path of espeak-ng. Raises ValueError if it is not installed."""
    if (path := which("espeak-ng")) is None:
        raise ValueError(
            "the experiment speech needs espeak-ng, which speaks the sentences, and it is not"
            " installed; run: apt-get install espeak-ng"
        )
    return path


def spoken(text: str, voice: str, words_a_minute: int, pitch: int) -> tuple[Tensor, list[str]]:
    """Samples (-1 to 1) and phonemes, without marks of stress and length. pitch: 0 to 99."""
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        told = subprocess.run(
            [
                espeak(),
                "-v",
                f"en-us+{voice}",
                "-s",
                str(words_a_minute),
                "-p",
                str(pitch),
                "-z",
                "--ipa",
                "--sep= ",
                "-w",
                file.name,
                text,
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        with wave.open(file.name) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
    phonemes = re.sub("[ˈˌː]", "", told.stdout).split()
    return torch.from_numpy(samples / np.float32(2**15)), phonemes


@cache
def mel_bands() -> Tensor:
    """Triangular filters from 60 Hz to 8 kHz, evenly spaced in mel: (FOURIER / 2 + 1, BANDS)."""
    mel = np.linspace(math.log1p(60 / 700), math.log1p(8_000 / 700), BANDS + 2)
    left, centre, right = (700 * np.expm1(mel[i : BANDS + i]) for i in range(3))
    f = np.linspace(0, RATE / 2, FOURIER // 2 + 1)[:, None]
    rising, falling = (f - left) / (centre - left), (right - f) / (right - centre)
    return torch.from_numpy(np.minimum(rising, falling).clip(0)).float()


def features(samples: Tensor) -> Tensor:
    """Logarithms of the energy in mel bands, each with mean 0 and deviation 1: (frames, BANDS)
    float16.
    """
    window = torch.hann_window(WINDOW, device="cpu")
    spectrum = torch.stft(samples, FOURIER, HOP, WINDOW, window, return_complex=True)
    energy = (spectrum.abs().square().T @ mel_bands() + 1e-6).log()
    return ((energy - energy.mean(0)) / (energy.std(0) + 1e-3)).half()


def utterance(*key: int, voices: tuple[str, ...]) -> Utterance:
    """A recording. Sentence, voice, rate, pitch, speed and noise are drawn from key.

    Speed is that of a tape, 0.9 to 1.1, which changes pitch and formants too. Noise is 5 to 30 dB
    below the speech.
    """
    draws = np.random.default_rng(key)
    samples, phonemes = spoken(
        sentence(draws),
        voices[draws.integers(len(voices))],
        int(draws.integers(130, 221)),
        int(draws.integers(25, 76)),
    )
    longer = 1 / draws.uniform(0.9, 1.1)
    sound = F.interpolate(samples[None, None], scale_factor=longer, mode="linear")[0, 0]
    white = torch.from_numpy(draws.standard_normal(len(sound) + 1).astype(np.float32))
    noise = white[1:] + draws.uniform(0, 0.9) * white[:-1]
    noise = noise * sound.std() / noise.std() * 10 ** (-draws.uniform(5, 30) / 20)
    return features(sound + noise), phonemes


def utterances(count: int, *key: int, voices: tuple[str, ...]) -> list[Utterance]:
    """Recordings 0 to count - 1 of a key."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda number: utterance(*key, number, voices=voices), range(count)))


def edits(said: list[int], heard: list[int]) -> int:
    """The fewest insertions, deletions and substitutions that turn one sequence into the other."""
    row = list(range(len(heard) + 1))
    for i, a in enumerate(said, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(heard, 1):
            diagonal, row[j] = row[j], min(diagonal + (a != b), row[j] + 1, row[j - 1] + 1)
    return row[-1]
