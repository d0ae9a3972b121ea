"""How soon the page can be used: from navigation to its mark `ready`, in chromium on the same
machine.

    python -m tools.benchmarks.page [--repeat 9]

Each load is that of a browser without a past, so that nothing comes from its cache.
"""

import shutil
import statistics

from playwright.sync_api import sync_playwright

from tools.harness.arguments import new_parser
from tools.harness.servers import ROOT, serving


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    seconds = []
    with (
        serving(ROOT / "checkpoints", "--models", "mnist-small") as server,
        sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for _ in range(args.repeat):
            context = browser.new_context()
            page = context.new_page()
            page.goto(server.url)
            page.wait_for_selector("html[data-ready]")
            seconds.append(
                page.evaluate("performance.getEntriesByName('ready')[0].startTime / 1000")
            )
            context.close()
        browser.close()
    print(
        f"ready after {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
    )


if __name__ == "__main__":
    main()
