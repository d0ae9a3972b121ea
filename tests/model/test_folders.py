import os
import shutil
import tempfile
from pathlib import Path

from linpix.model import folders


def test_a_folder_without_permission_is_not_a_checkpoint_and_does_not_hide_the_others(tiny):
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        root.chmod(0o755)
        shutil.copytree(tiny, root / "tiny")
        shutil.copytree(tiny, root / "lost+found")
        (root / "lost+found").chmod(0)
        user = os.geteuid()
        os.seteuid(user or 65534)  # the superuser may read everything: nobody in particular may not
        try:
            assert folders.under(root) == [root / "tiny"]
        finally:
            os.seteuid(user)
        (root / "lost+found").chmod(0o700)
