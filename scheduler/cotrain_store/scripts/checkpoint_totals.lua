-- checkpoint_totals: return the number and bytes of a tenant's checkpoints, including unstored ones.
-- needs: checkpoint_index
local args = cjson.decode(ARGV[1])
local sizes = 'cotrain:tenant:' .. args.tenant .. ':checkpoint_sizes'

remove_expired(args.tenant)
local bytes = 0
for _, size in ipairs(redis.call('HVALS', sizes)) do
  bytes = bytes + tonumber(size)
end
return { redis.call('HLEN', sizes) + redis.call('SCARD', 'cotrain:tenant:' .. args.tenant .. ':owed'), bytes }
