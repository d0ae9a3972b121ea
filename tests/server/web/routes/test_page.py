"""The files of the web page: vendored ones as listed in VENDORED.md, and none from other
servers.
"""

import gzip
import hashlib
import re
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

import pytest

from linpix.server.web.routes.page import STATIC, compressed, page_at
from tools.harness.commands import ROOT
from tools.harness.servers import here

OURS = {
    "VENDORED.md",
    "favicon.svg",
    "index.html",
    "docs.html",
    "docs.js",
    "page.css",
    "page.js",
    "service.js",
    "parts.js",
    "gallery.js",
    "samples.js",
    "editor.js",
    "completion.js",
    "upload.js",
    "race.js",
    "inside.css",
    "inside.html",
    "inside.js",
    "likelihood.js",
    "tries.js",
    "word.js",
    "film.js",
    "preview.png",
}
# attributes that name another resource
LOADS = {"src", "href", "srcset", "action", "formaction", "poster", "data"}


class References(HTMLParser):
    """The resources that a page names, its links to elsewhere, and its inline scripts and
    styles.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.links: list[str] = []
        self.inline: list[str] = []
        self._keep = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        # nothing is loaded from there
        if tag == "a" and (dict(attributes).get("href") or "").startswith("https:"):
            assert dict(attributes)["rel"] == "noreferrer"
            self.links.append(str(dict(attributes)["href"]))
        else:
            self.urls += [value for name, value in attributes if name in LOADS and value]
        self._keep = tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self._keep and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._keep = False


@pytest.mark.parametrize(
    ("folder", "which"), [(STATIC, "*"), (ROOT / "tests/browser", "axe*")], ids=["page", "tests"]
)
def test_the_vendored_files_are_those_of_the_list(folder, which):
    listed = dict(
        re.findall(
            r"^\| `([^`]+)` \| [^|]+ \| `([0-9a-f]{64})` \|$",
            (folder / "VENDORED.md").read_text(),
            re.MULTILINE,
        )
    )
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob(which)
        if path.name not in OURS
    }
    assert found == listed


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_a_page_names_resources_of_its_own_server_only_and_all_of_them_are_there(server, page):
    with server.client() as client:
        references = References(client.get(page).text)
        here = urlsplit(server.url)
        assert references.urls
        assert set(references.links) == (
            {"https://arxiv.org/abs/2006.16236"} if page == "/" else set()
        )
        for url in references.urls:
            absolute = urljoin(server.url + page, url)
            assert urlsplit(absolute)[:2] == here[:2], f"{page} names {url}"
            assert client.get(absolute).status_code == 200, f"{page} names {url}"
        for text in references.inline:
            assert not re.search(r"https?:|[\"'(]//|@import", text), f"{page} has {text!r}"


def test_the_picture_of_a_link_has_a_whole_address_under_the_path_of_a_proxy_too(tiny):
    with here(tiny.parent, root_path="/pix") as server, server.client() as client:
        for coding in ("identity", "gzip"):
            html = client.get("https://a.localhost/", headers={"accept-encoding": coding}).text
            [address] = re.findall(r'og:image" content="([^"]+)"', html)
            assert address == "https://a.localhost/pix/static/preview.png"
        picture = client.get(address)
        assert picture.headers["content-type"] == "image/png" and len(picture.content) < 6000


def test_no_stylesheet_or_script_names_a_file_elsewhere():
    for path in STATIC.glob("*.css"):
        css = path.read_text()
        assert "@import" not in css
        assert all(url.startswith("data:") for url in re.findall(r"url\(\s*[\"']?([^)\"']*)", css))
    for path in [*STATIC.glob("*.css"), *STATIC.glob("*.js")]:
        assert "sourceMappingURL" not in path.read_text(), (
            f"{path.name} names a source map that is not here"
        )
    assert re.findall(r"(?:xlink:)?href=|url\(", (STATIC / "favicon.svg").read_text()) == []


@pytest.mark.parametrize("path", ["/", "/static/page.js"])
def test_a_file_comes_whole_whatever_part_of_it_is_asked_for(client, path):
    whole = client.get(path)
    assert whole.headers["accept-ranges"] == "none"
    for part in ("bytes=0-3", "bytes=99999999-", "bytes=x", "lines=1-2"):
        answer = client.get(path, headers={"range": part})
        assert (answer.status_code, answer.content) == (200, whole.content)


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/static/swagger-ui.css", "/v1/models"])
def test_the_page_is_compressed_for_those_who_ask_and_the_api_is_not(client, path):
    plain = client.get(path, headers={"accept-encoding": "identity"})
    packed = client.get(path, headers={"accept-encoding": "gzip"})
    assert packed.content == plain.content
    assert "content-encoding" not in plain.headers
    if path.startswith("/v1/"):
        assert "content-encoding" not in packed.headers
        return
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.num_bytes_downloaded < 0.5 * len(plain.content)
    assert (
        "Accept-Encoding" in packed.headers["vary"] and "Accept-Encoding" in plain.headers["vary"]
    )
    assert packed.headers["etag"] != plain.headers["etag"], "a strong ETag is of these bytes"
    for answer, other, coding in ((packed, plain, "gzip"), (plain, packed, "identity")):
        for tag, status in ((answer.headers["etag"], 304), (other.headers["etag"], 200)):
            known = {"accept-encoding": coding, "if-none-match": tag}
            assert client.get(path, headers=known).status_code == status
    assert client.head(path, headers={"accept-encoding": "gzip"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "made"), [("/static/swagger-ui-bundle.js", compressed), ("/", page_at)]
)
def test_a_file_is_compressed_once_however_often_it_is_asked_for(client, path, made):
    content = client.get(path, headers={"accept-encoding": "gzip"}).content
    before = made.cache_info().misses
    for _ in range(3):
        assert client.get(path, headers={"accept-encoding": "gzip"}).content == content
    assert made.cache_info().misses == before


def test_a_file_that_was_changed_is_compressed_again(tmp_path):
    file = tmp_path / "page.js"
    for text in (b"before", b"after"):
        file.write_bytes(text)
        assert gzip.decompress(compressed(str(file), file.stat().st_mtime_ns)) == text
