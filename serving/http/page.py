"""GET /: one page without external assets, to send a prompt and watch what drafting does."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter, Response


def router() -> APIRouter:
    """The route; the page is read once."""
    routes = APIRouter()
    html = files("serving.http").joinpath("static", "index.html").read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _policy(html), "Referrer-Policy": "no-referrer"}

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(html, media_type="text/html", headers=headers)

    return routes


def _policy(html: str) -> str:
    """Only the page's own script and style run, and they talk to this server only."""
    digests = {}
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    sources = "; ".join(f"{tag}-src 'sha256-{digest}'" for tag, digest in digests.items())
    return f"default-src 'none'; {sources}; connect-src 'self'; base-uri 'none'; form-action 'none'"
