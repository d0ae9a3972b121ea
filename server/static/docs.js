// The page /docs: Swagger UI over this server's own /openapi.json.

// Dark mode is Swagger UI's own, but it does not choose it by itself.
const dark = matchMedia("(prefers-color-scheme: dark)");
const dress = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dress();
dark.addEventListener("change", dress);

// Fields of forms begin empty: otherwise Swagger UI would send an example in every field that the user leaves alone.
// The examples go into the descriptions.
function withEmptyForms(spec) {
  spec.servers = [{ url: new URL(".", location).href.slice(0, -1) }]; // a proxy may have put it under a path
  const named = (schema) =>
    schema.$ref ? spec.components.schemas[schema.$ref.split("/").pop()] : schema;
  for (const operations of Object.values(spec.paths))
    for (const { requestBody } of Object.values(operations)) {
      const form = requestBody?.content["multipart/form-data"];
      for (const field of Object.values(form ? named(form.schema).properties : {})) {
        const [example] = field.examples ?? [];
        if (typeof example === "object" || example === undefined) continue;
        field.description += `; such as ${example}`;
        field.examples = [""];
      }
    }
  return spec;
}

fetch("openapi.json")
  .then((answer) => answer.json())
  .then((spec) =>
    SwaggerUIBundle({
      spec: withEmptyForms(spec),
      dom_id: "#swagger-ui",
      deepLinking: true,
      displayRequestDuration: true,
      presets: [SwaggerUIBundle.presets.apis],
      layout: "BaseLayout",
    }),
  );
