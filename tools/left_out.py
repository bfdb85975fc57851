"""Modules of the bundled wheels that stay out of the single file, each for a reason.

The file has to stay small (``build_shim.LARGEST``), and it holds everything once for each Python.
A pattern is a module's path, a folder with ``/*``, or begins with ``*`` and fits any path's end.
"""

from __future__ import annotations


def _of(folder: str, modules: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{module}.py" for module in modules.split())


LEFT_OUT = (
    "anyio/_backends/_trio.py",  # the daemon runs on asyncio
    "anyio/pytest_plugin.py",
    # Stand-ins of ours have their names, see bundle.py; click was for uvicorn's.
    "certifi/*",
    "charset_normalizer/*",
    "click/*",
    "uvicorn/main.py",
    "uvicorn/supervisors/*",
    *_of("docker/transport", "npipeconn npipesocket"),  # Windows
    "dstack_shim_contracts/golden/*",  # examples and schemas serve tests and other languages
    "dstack_shim_contracts/schemas/*",
    # The console asks its own host, waits for the answer, and speaks HTTP/1.1.
    *_of("httpcore/_backends", "anyio trio"),
    *_of("httpcore/_async", "http2 socks_proxy"),
    *_of("httpcore/_sync", "http2 socks_proxy"),
    "httpx/_main.py",  # its own command line; it would bring half of rich along
    "idna/cli.py",
    # Versions are compared, nothing is resolved or installed.
    "packaging/licenses/*",
    *_of("packaging", "_elffile _manylinux _musllinux _parser _ranges _tokenizer"),
    *_of("packaging", "dependency_groups direct_url markers metadata pylock ranges"),
    *_of("packaging", "requirements specifiers tags utils"),
    # Of rich, what measures and what colours text: tables and consoles would take a third of the
    # time that a command has.
    *_of("rich", "__main__ _emoji_codes _emoji_replace _export_format _fileno _inspect"),
    *_of("rich", "_log_render _loop _null_file _pick _ratio _spinners _stack _timer"),
    *_of("rich", "_win32_console _windows _windows_renderer _wrap abc align ansi bar box"),
    *_of("rich", "columns console constrain containers control default_styles diagnose"),
    *_of("rich", "emoji file_proxy filesize highlighter json jupyter layout live live_render"),
    *_of("rich", "logging markdown markup measure padding pager panel pretty progress"),
    *_of("rich", "progress_bar prompt protocol region rule scope screen segment spinner status"),
    *_of("rich", "styled syntax table text theme themes traceback tree"),
    # The API is a dozen routes behind a guard of its own.
    *_of("starlette", "authentication config schemas staticfiles templating testclient"),
    *_of("starlette/middleware", "authentication cors gzip httpsredirect opentelemetry"),
    *_of("starlette/middleware", "sessions trustedhost wsgi"),
    *_of("urllib3/contrib", "pyopenssl socks"),
    "urllib3/contrib/emscripten/*",  # for browsers
    "urllib3/http2/connection.py",
    # One process that speaks HTTP/1.1 through h11.
    *_of("uvicorn", "__main__ workers"),
    *_of("uvicorn/protocols/http", "auto_zttp_impl httptools_impl zttp_h2_impl zttp_impl"),
    *_of("uvicorn/protocols/websockets", "websockets_impl websockets_sansio_impl wsproto_impl"),
    "*/py.typed",  # for type checkers
    "*.pyi",
)
