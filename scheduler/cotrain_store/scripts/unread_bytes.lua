-- unread_bytes: the bytes of results that lie here for each tenant and were never sent, as its quota counts.
-- needs: unread
local args = cjson.decode(ARGV[1])
local sizes = {}
for i, tenant in ipairs(args.tenants) do
  sizes[i] = unread_bytes(tenant)
end
return sizes
