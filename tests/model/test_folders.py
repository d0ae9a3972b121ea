import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from linpix.model import folders


@contextlib.contextmanager
def anybody():
    """Root may read everything: nobody in particular may not."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_folder_without_permission_is_not_a_checkpoint_and_does_not_hide_the_others(tiny):
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        root.chmod(0o755)
        shutil.copytree(tiny, root / "tiny")
        shutil.copytree(tiny, root / "lost+found")
        (root / "lost+found").chmod(0)
        with anybody():
            assert folders.under(root) == [root / "tiny"]
        (root / "lost+found").chmod(0o700)
