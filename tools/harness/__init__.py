"""What tests and benchmarks share: servers, a client under load, the emulated GPU, arguments. Tests
import tools; tools import no tests.
"""
