"""Take out of a new environment what does not fit it. `make` calls this as the last step of its set-up.

- **A torchvision that was built for another torch.** The one of a package index's own is compiled for the CUDA build.
  Beside a CPU build `import torchvision` fails, and with it the model classes of transformers and peft, which work
  without. It goes into a folder where only the tests look: timm cannot be imported without it, and they need none of
  its compiled operators (tests/kits/outside).
- **rfc3987-syntax**, by which jsonschema checks addresses that no notebook has. It builds 38 parsers when it is
  imported: four seconds of each process that reads a notebook.
"""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

ASIDE = Path(sys.prefix) / "torchvision-without-operators"


def main():
    if installed("rfc3987-syntax"):
        pip("uninstall", "--yes", "rfc3987-syntax")
    if installed("torchvision") and not imports("torchvision") and imports("torch"):
        put_torchvision_aside(metadata.version("torchvision"), metadata.version("torch"))


def put_torchvision_aside(version, torch):
    print(f"torchvision {version} was not built for torch {torch}: it is left out, and kept for the tests of timm's")
    pip("install", "--no-deps", "--no-compile", "--upgrade", "--target", str(ASIDE), f"torchvision=={version}")
    pip("uninstall", "--yes", "torchvision")


def installed(name):
    """Tell whether a package is there."""
    return any(True for _ in metadata.distributions(name=name))


def imports(name):
    """Tell whether `import name` works."""
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True).returncode == 0


def pip(*arguments):
    """Run pip, without its output if it works."""
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
    if done.returncode:
        sys.exit(f"pip {' '.join(arguments)} failed:\n{done.stdout}")


if __name__ == "__main__":
    main()
