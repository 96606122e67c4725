"""The fixture tools, resources and prompts of the official MCP suite, on the hub's own MCP server. For tests only."""

from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types
from mcp.server.lowlevel.server import Server
from mcp.shared.exceptions import MCPError

MISSING_CAPABILITY = -32021

# A red pixel and an empty WAV file, as small as they get.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
WAV = "UklGRiQAAABXQVZFZm10IBAAAAABAAEARKwAAIhYAQACABAAZGF0YQAAAAA="

SCHEMA_2020_12 = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def text(words: str) -> types.TextContent:
    return types.TextContent(type="text", text=words)


def embedded(uri: str, words: str) -> types.EmbeddedResource:
    content = types.TextResourceContents(uri=uri, mime_type="text/plain", text=words)
    return types.EmbeddedResource(type="resource", resource=content)


IMAGE = types.ImageContent(type="image", data=PNG, mime_type="image/png")
TOOLS: dict[str, types.CallToolResult] = {
    "test_simple_text": types.CallToolResult(content=[text("This is a simple text response for testing.")]),
    "test_image_content": types.CallToolResult(content=[IMAGE]),
    "test_audio_content": types.CallToolResult(
        content=[types.AudioContent(type="audio", data=WAV, mime_type="audio/wav")]
    ),
    "test_embedded_resource": types.CallToolResult(
        content=[embedded("test://embedded-resource", "This is an embedded resource content.")]
    ),
    "test_multiple_content_types": types.CallToolResult(
        content=[
            text("Multiple content types test:"),
            IMAGE,
            types.EmbeddedResource(
                type="resource",
                resource=types.TextResourceContents(
                    uri="test://mixed-content-resource",
                    mime_type="application/json",
                    text='{"test":"data","value":123}',
                ),
            ),
        ]
    ),
    "test_error_handling": types.CallToolResult(
        content=[text("This tool intentionally returns an error for testing")], is_error=True
    ),
    "json_schema_2020_12_tool": types.CallToolResult(content=[text("{}")]),
    "test_logging_tool": types.CallToolResult(content=[text("no log")]),
    "test_streaming_elicitation": types.CallToolResult(content=[text("no question")]),
    "test_missing_capability": types.CallToolResult(content=[]),
}
RESOURCES = {
    "test://static-text": types.TextResourceContents(
        uri="test://static-text",
        mime_type="text/plain",
        text="This is the content of the static text resource.",
    ),
    "test://static-binary": types.BlobResourceContents(
        uri="test://static-binary", mime_type="image/png", blob=PNG
    ),
}
PROMPTS: dict[str, tuple[list[str], Callable[[dict[str, str]], list[Any]]]] = {
    "test_simple_prompt": ([], lambda given: [text("This is a simple prompt for testing.")]),
    "test_prompt_with_arguments": (
        ["arg1", "arg2"],
        lambda given: [text(f"Prompt with arguments: arg1='{given['arg1']}', arg2='{given['arg2']}'")],
    ),
    "test_prompt_with_embedded_resource": (
        ["resourceUri"],
        lambda given: [
            embedded(given["resourceUri"], "Embedded resource content for testing."),
            text("Please process the embedded resource above."),
        ],
    ),
    "test_prompt_with_image": ([], lambda given: [IMAGE, text("Please analyze the image above.")]),
}


def with_fixtures(served: Server[Any]) -> Server[Any]:
    """The server with its own tools and the tools that the suite requires."""

    def own(method: str) -> Callable[[Any, Any], Awaitable[Any]]:
        entry = served.get_request_handler(method)
        assert entry
        return entry.handler

    list_tools, call_tool = own("tools/list"), own("tools/call")
    list_resources, read_resource = own("resources/list"), own("resources/read")
    list_prompts, get_prompt = own("prompts/list"), own("prompts/get")

    async def all_tools(ctx: Any, params: Any) -> types.ListToolsResult:
        schemas = {"json_schema_2020_12_tool": SCHEMA_2020_12}
        more = [
            types.Tool(name=name, description=name, input_schema=schemas.get(name, {"type": "object"}))
            for name in TOOLS
        ]
        return types.ListToolsResult(tools=[*(await list_tools(ctx, params)).tools, *more])

    async def any_tool(ctx: Any, params: types.CallToolRequestParams) -> Any:
        if params.name == "test_missing_capability":
            raise MCPError(
                MISSING_CAPABILITY, "sampling is needed", {"requiredCapabilities": {"sampling": {}}}
            )
        return TOOLS[params.name] if params.name in TOOLS else await call_tool(ctx, params)

    async def all_resources(ctx: Any, params: Any) -> types.ListResourcesResult:
        more = [
            types.Resource(
                uri=uri, name=uri.removeprefix("test://"), description=uri, mime_type=content.mime_type
            )
            for uri, content in RESOURCES.items()
        ]
        return types.ListResourcesResult(resources=[*(await list_resources(ctx, params)).resources, *more])

    async def any_resource(ctx: Any, params: types.ReadResourceRequestParams) -> Any:
        uri = str(params.uri)
        if uri in RESOURCES:
            return types.ReadResourceResult(contents=[RESOURCES[uri]])
        if uri.startswith("test://template/") and uri.endswith("/data"):
            key = uri.split("/")[3]
            words = f'{{"id":"{key}","templateTest":true,"data":"Data for ID: {key}"}}'
            content = types.TextResourceContents(uri=uri, mime_type="application/json", text=words)
            return types.ReadResourceResult(contents=[content])
        return await read_resource(ctx, params)

    async def templates(ctx: Any, params: Any) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(
            uri_template="test://template/{id}/data", name="template", description="A template"
        )
        return types.ListResourceTemplatesResult(resource_templates=[template])

    async def all_prompts(ctx: Any, params: Any) -> types.ListPromptsResult:
        more = [
            types.Prompt(
                name=name,
                description=name,
                arguments=[types.PromptArgument(name=each, required=True) for each in wanted],
            )
            for name, (wanted, _) in PROMPTS.items()
        ]
        return types.ListPromptsResult(prompts=[*(await list_prompts(ctx, params)).prompts, *more])

    async def any_prompt(ctx: Any, params: types.GetPromptRequestParams) -> Any:
        if params.name not in PROMPTS:
            return await get_prompt(ctx, params)
        blocks = PROMPTS[params.name][1](params.arguments or {})
        return types.GetPromptResult(
            messages=[types.PromptMessage(role="user", content=each) for each in blocks]
        )

    for method, kind, handler in (
        ("tools/list", types.PaginatedRequestParams, all_tools),
        ("tools/call", types.CallToolRequestParams, any_tool),
        ("resources/list", types.PaginatedRequestParams, all_resources),
        ("resources/read", types.ReadResourceRequestParams, any_resource),
        ("resources/templates/list", types.PaginatedRequestParams, templates),
        ("prompts/list", types.PaginatedRequestParams, all_prompts),
        ("prompts/get", types.GetPromptRequestParams, any_prompt),
    ):
        served.add_request_handler(method, kind, handler)
    served.get_tool_input_schema = None
    return served
