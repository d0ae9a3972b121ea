"""Security headers of every answer, and the Content-Security-Policy of a page."""

import base64
import hashlib
import re

_INLINE = re.compile(r"<(script|style)(?:\s(?![^>]*\bsrc=)[^>]*)?>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


def content_policy(html: str = "", *, style_attributes: bool = False) -> str:
    """A Content-Security-Policy that allows this server's own resources, and what is inline in our page."""
    inline: dict[str, list[str]] = {"script": ["'self'"], "style": ["'self'"]}
    for kind, text in _INLINE.findall(html):
        inline[kind.lower()].append(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    if style_attributes:  # no hashes: with them, browsers would ignore 'unsafe-inline'
        inline["style"] = ["'self'", "'unsafe-inline'"]
    directives = {"default-src": ["'self'"], **{f"{kind}-src": sources for kind, sources in inline.items()},
                  "img-src": ["'self'", "data:", "blob:"], "object-src": ["'none'"], "base-uri": ["'none'"],
                  "form-action": ["'self'"], "frame-ancestors": ["'none'"]}
    return "; ".join(f"{name} {' '.join(sources)}" for name, sources in directives.items())


SECURITY_HEADERS = {
    "content-security-policy": content_policy(),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # not no-referrer: forms of our own pages would then come from origin null
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
