-- unread_bytes: return the bytes of stored and never sent results per tenant, as counted by its quota.
-- needs: unread
local args = cjson.decode(ARGV[1])
local sizes = {}
for i, tenant in ipairs(args.tenants) do
  sizes[i] = unread_bytes(tenant)
end
return sizes
